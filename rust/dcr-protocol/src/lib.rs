//! Coordinator, owner, receiver and commit record as state machines: events in, actions out.
