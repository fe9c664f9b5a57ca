//! The running owner, receiver, coordinator and relay.
