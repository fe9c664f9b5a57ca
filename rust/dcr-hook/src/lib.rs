//! The aten::copy_ dispatch hook: torch's stable C shim in cpp/, bridged to dcr-core by cxx.
