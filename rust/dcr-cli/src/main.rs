//! The dcr program.
fn main() {}
