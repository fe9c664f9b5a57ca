//! Canonical names, bit comparison, payload format, baseline and application on raw memory: pure, no I/O.
