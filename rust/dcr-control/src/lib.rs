//! The durable commit record: one trait, one module per store.
