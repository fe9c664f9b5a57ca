//! The aten::copy_ dispatch hook: torch's stable C shim in cpp/, bridged to dcr-core by cxx (section 6.1).
//!
//! The C++ half registers a kernel and describes tensors; the decision is [`dcr_core::interceptor::Interceptor`]'s.

// cxx's generated glue is unsafe code; nothing else here is.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use dcr_core::dtype::DType;
use dcr_core::interceptor::{Interceptor, Verdict, View};
use parking_lot::Mutex;
use thiserror::Error;

#[cxx::bridge(namespace = "dcr")]
mod ffi {
    /// One side of a copy, as torch describes it. Strides are in elements.
    struct TensorView<'a> {
        data: usize,
        dtype: i32,
        cpu: bool,
        sizes: &'a [i64],
        strides: &'a [i64],
    }

    extern "Rust" {
        fn on_copy(dst: &TensorView, src: &TensorView) -> bool;
    }

    unsafe extern "C++" {
        include!("copy_hook.h");

        fn install(key: &str, key_number: u16) -> String;
        fn set_active(active: bool);
        fn dtype_number(name: &str) -> i32;
    }
}

/// Why the hook cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HookError {
    /// Torch does not offer what the hook needs.
    #[error("{0}")]
    Torch(String),
    /// The hook was not installed.
    #[error("the copy_ hook has not been installed")]
    NotInstalled,
    /// This thread has an interceptor at work already.
    #[error("an interceptor is at work on this thread already")]
    Nested,
    /// A copy was not performed, nor any after it: deciding on it panicked. The attempt has failed.
    #[error("a fault in dcr stopped the interception of copies, and none was performed since: {0}")]
    Panicked(String),
}

static INSTALLED: OnceLock<Result<Vec<(i32, DType)>, HookError>> = OnceLock::new();

/// What a guard put to work on its thread.
struct Current {
    interceptor: Arc<Mutex<Interceptor>>,
    panic: Option<String>,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Torch's names of the dtypes that dcr knows.
const DTYPES: [(&str, DType); 12] = [
    ("bfloat16", DType::Bf16),
    ("float16", DType::F16),
    ("float32", DType::F32),
    ("float64", DType::F64),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
    ("int8", DType::I8),
    ("int16", DType::I16),
    ("int32", DType::I32),
    ("int64", DType::I64),
    ("uint8", DType::U8),
    ("bool", DType::Bool),
];

/// Registers the kernel for a dispatch key of the torch in this process; once, later calls repeat the first answer.
///
/// `number` is the key's number in that torch: it differs between releases.
pub fn install(key: &str, number: u16) -> Result<(), HookError> {
    let installed = INSTALLED.get_or_init(|| {
        let reason = ffi::install(key, number);
        if !reason.is_empty() {
            return Err(HookError::Torch(reason));
        }
        let numbers = DTYPES.iter().map(|(name, dtype)| (ffi::dtype_number(name), *dtype));
        Ok(numbers.filter(|(number, _)| *number >= 0).collect())
    });
    installed.as_ref().map(|_| ()).map_err(Clone::clone)
}

/// While it lives, the copies of the thread that made it go to its interceptor.
#[derive(Debug)]
pub struct Guard {
    // The dispatch set belongs to a thread, so the guard stays on it.
    this_thread: PhantomData<*const ()>,
}

impl Guard {
    /// Starts intercepting on this thread.
    pub fn enter(interceptor: Arc<Mutex<Interceptor>>) -> Result<Self, HookError> {
        if !matches!(INSTALLED.get(), Some(Ok(_))) {
            return Err(HookError::NotInstalled);
        }
        CURRENT.with_borrow_mut(|current| match current {
            Some(_) => Err(HookError::Nested),
            None => {
                *current = Some(Current { interceptor, panic: None });
                Ok(())
            }
        })?;
        ffi::set_active(true);
        Ok(Self { this_thread: PhantomData })
    }

    /// Ends the interception.
    ///
    /// # Errors
    /// [`HookError::Panicked`]: what the loader did is not complete, whatever the interceptor's outcome says.
    pub fn close(self) -> Result<(), HookError> {
        let panic = CURRENT.with_borrow_mut(|current| current.as_mut().and_then(|current| current.panic.take()));
        panic.map_or(Ok(()), |reason| Err(HookError::Panicked(reason)))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        ffi::set_active(false);
        CURRENT.with_borrow_mut(|current| *current = None);
    }
}

/// Called by the kernel for every copy_ of a thread with a guard. True: torch must not perform the copy.
fn on_copy(dst: &ffi::TensorView<'_>, src: &ffi::TensorView<'_>) -> bool {
    decide(|interceptor| interceptor.lock().on_copy(&view(dst), &view(src)))
}

/// The verdict of this thread's interceptor. A panic must not cross into C++: it is kept for [`Guard::close`], and
/// from then on nobody performs a copy, since which of them end in resident memory is no longer known.
fn decide(verdict: impl FnOnce(&Mutex<Interceptor>) -> Verdict) -> bool {
    let interceptor = CURRENT.try_with(|current| match &*current.borrow() {
        None => Err(false),
        Some(Current { panic: Some(_), .. }) => Err(true),
        Some(Current { interceptor, .. }) => Ok(Arc::clone(interceptor)),
    });
    let interceptor = match interceptor {
        Ok(Ok(interceptor)) => interceptor,
        Ok(Err(handled)) => return handled,
        // The thread ends, and its guard with it.
        Err(_) => return false,
    };
    match catch_unwind(AssertUnwindSafe(|| verdict(&interceptor))) {
        Ok(verdict) => verdict == Verdict::Handled,
        Err(panic) => {
            CURRENT.with_borrow_mut(|current| {
                if let Some(current) = current {
                    current.panic = Some(words(panic.as_ref()));
                }
            });
            true
        }
    }
}

/// A panic's message, in one line.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    text.lines().next().unwrap_or_default().to_owned()
}

fn view<'a>(tensor: &ffi::TensorView<'a>) -> View<'a> {
    let numbers = INSTALLED.get().and_then(|installed| installed.as_ref().ok()).map_or(&[][..], Vec::as_slice);
    View {
        data: tensor.data,
        dtype: numbers.iter().find(|(number, _)| *number == tensor.dtype).map(|(_, dtype)| *dtype),
        device_is_cpu: tensor.cpu,
        sizes: tensor.sizes,
        strides: tensor.strides,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A test process has no torch: the hook says what is missing and nothing is intercepted.
    #[test]
    fn without_torch_the_reason_is_named() {
        assert_eq!(Guard::enter(Arc::default()).unwrap_err(), HookError::NotInstalled);
        let error = install("DeferredInit", 40).unwrap_err();
        assert!(error.to_string().contains("aoti_torch_get_data_ptr"), "{error}");
        assert_eq!(install("DeferredInit", 40).unwrap_err(), error, "asked once");
        assert_eq!(Guard::enter(Arc::default()).unwrap_err(), HookError::NotInstalled);
    }

    /// What `Guard::enter` leaves behind, without a torch to tell.
    fn put_to_work() -> Guard {
        CURRENT.set(Some(Current { interceptor: Arc::default(), panic: None }));
        Guard { this_thread: PhantomData }
    }

    #[test]
    fn a_panic_stops_all_copies_and_is_reported_once() {
        let guard = put_to_work();
        assert!(!decide(|_| Verdict::PassThrough));
        assert!(decide(|_| Verdict::Handled));
        assert!(decide(|_| panic!("an index\nof 3")), "torch must not perform it");
        assert!(decide(|_| Verdict::PassThrough), "nor any later one");
        assert_eq!(guard.close(), Err(HookError::Panicked("an index".into())));
        assert!(!decide(|_| Verdict::Handled), "nothing is at work");
        assert_eq!(put_to_work().close(), Ok(()));
    }
}
