//! File-backed memory for the source baseline, for hosts that cannot hold a copy of their share in memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcr_core::baseline::{Allocate, Memory, in_memory};
use memmap2::MmapMut;

use crate::NodeError;

/// Tensors below this many bytes stay in memory: each mapping takes at least a page and an entry in the kernel.
const SMALL: usize = 64 << 10;

/// Memory in unnamed files of `folder`, which the kernel writes back and drops when memory is short. Nothing is left of
/// them when the process ends, however it ends.
pub(crate) fn in_folder(folder: &Path) -> Result<Allocate, NodeError> {
    let folder: Arc<PathBuf> = Arc::new(folder.to_owned());
    let probe = tempfile::tempfile_in(folder.as_path());
    probe.map_err(|source| NodeError::Folder { folder: folder.as_path().to_owned(), source })?;
    let allocate = move |name: &str, bytes: usize| -> io::Result<Memory> {
        if bytes < SMALL {
            return in_memory(name, bytes);
        }
        let file = tempfile::tempfile_in(folder.as_path())?;
        reserve(&file, bytes)?;
        // SAFETY: the file has no name and this is its only handle, so nobody else can change or cut it.
        let mapping = unsafe { MmapMut::map_mut(&file)? };
        Ok(Box::new(mapping))
    };
    Ok(Box::new(allocate))
}

/// Takes the disk's blocks now: writing to a mapping of a full disk would be a signal instead of an error.
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64).map_err(io::Error::from)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn large_tensors_lie_in_files_that_have_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let allocate = in_folder(folder.path()).unwrap();
        for bytes in [0, 10, SMALL - 1, SMALL, 3 * SMALL + 1] {
            let mut memory = allocate("w", bytes).unwrap();
            assert_eq!(memory.len(), bytes);
            assert!(memory.iter().all(|byte| *byte == 0));
            memory.fill(7);
            assert!(memory.iter().all(|byte| *byte == 7));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_folder_and_a_full_disk_are_errors() {
        let missing = in_folder(Path::new("/nonexistent/baseline")).err().unwrap().to_string();
        assert!(missing.contains("/nonexistent/baseline"), "{missing}");
        let folder = tempfile::tempdir().unwrap();
        let allocate = in_folder(folder.path()).unwrap();
        assert!(allocate("w", 1 << 60).is_err());
    }
}
