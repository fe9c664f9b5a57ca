//! The Python module `dcr._native`: owner, coordinator and receiver of a refit, and the interceptor of the
//! native loader's copies. Python hands over tensors, calls the native loader and reports; nothing else.

mod assembly;
mod coordinator;
mod errors;
mod hook;
mod interceptor;
mod item;
mod memory;
mod owner;
mod projection;
mod receiver;

use pyo3::prelude::*;

/// `dcr._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    start_logging();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("RefitError", module.py().get_type::<errors::RefitError>())?;
    module.add_class::<owner::Owner>()?;
    module.add_class::<projection::Projection>()?;
    module.add_class::<assembly::Assembly>()?;
    module.add_class::<coordinator::Coordinator>()?;
    module.add_class::<receiver::Receiver>()?;
    module.add_class::<receiver::Task>()?;
    module.add_class::<item::Item>()?;
    module.add_class::<interceptor::Interceptor>()?;
    module.add_class::<interceptor::Outcome>()?;
    module.add_class::<hook::CopyHookGuard>()?;
    for function in [
        wrap_pyfunction!(item::make_item, module)?,
        wrap_pyfunction!(item::raw_item, module)?,
        wrap_pyfunction!(item::encode_payload, module)?,
        wrap_pyfunction!(item::decode_payload, module)?,
        wrap_pyfunction!(projection::assign_owners, module)?,
        wrap_pyfunction!(projection::fingerprints, module)?,
        wrap_pyfunction!(interceptor::classify, module)?,
        wrap_pyfunction!(hook::install_copy_hook, module)?,
    ] {
        module.add_function(function)?;
    }
    Ok(())
}

/// Logs to standard error as `DCR_LOG` says; warnings by default. A subscriber that is there already stays.
fn start_logging() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("DCR_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
