//! The commit record in one file, for one machine: advisory lock, fsync, rename, fsync of the folder.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use dcr_protocol::CommitRecord;
use tokio::task::spawn_blocking;

use crate::{CommitStore, ControlError, Swap};

/// A commit record in a file. Several processes of one machine may share it.
#[derive(Clone, Debug)]
pub struct EmbeddedStore {
    path: PathBuf,
}

impl EmbeddedStore {
    /// A store in this file. The file need not exist yet; its folder is made when missing.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self, ControlError> {
        let store = Self { path: path.into() };
        if store.path.is_dir() || store.path.file_name().is_none() {
            let source = io::Error::new(io::ErrorKind::IsADirectory, "it is a folder, and must be a file");
            return Err(store.error("use it", source));
        }
        fs::create_dir_all(store.folder()).map_err(|source| store.error("make its folder", source))?;
        Ok(store)
    }

    fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        }
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(suffix);
        name.into()
    }

    fn error(&self, doing: &'static str, source: io::Error) -> ControlError {
        ControlError::File { path: self.path.clone(), doing, source }
    }

    fn read_now(&self) -> Result<Option<CommitRecord>, ControlError> {
        match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| ControlError::Malformed { path: self.path.clone(), reason: error.to_string() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.error("read it", source)),
        }
    }

    fn swap_now(&self, expected: Option<CommitRecord>, new: CommitRecord) -> Result<Swap, ControlError> {
        // The lock is on a file of its own: renaming over a locked file would let a second writer lock the new one.
        let lock = File::create(self.beside(".lock")).map_err(|source| self.error("open its lock", source))?;
        lock.lock().map_err(|source| self.error("lock it", source))?;
        let found = self.read_now()?;
        if found != expected {
            return Ok(Swap::Differs(found));
        }
        let draft = self.beside(".new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&draft)?;
            serde_json::to_writer(&mut file, &new)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            fs::rename(&draft, &self.path)?;
            File::open(self.folder())?.sync_all()
        };
        write().map_err(|source| self.error("write it", source))?;
        Ok(Swap::Done)
    }
}

#[async_trait]
impl CommitStore for EmbeddedStore {
    async fn read(&self) -> Result<Option<CommitRecord>, ControlError> {
        let store = self.clone();
        spawn_blocking(move || store.read_now()).await.map_err(|_| ControlError::Stopped)?
    }

    async fn compare_and_set(&self, expected: Option<CommitRecord>, new: CommitRecord) -> Result<Swap, ControlError> {
        let store = self.clone();
        spawn_blocking(move || store.swap_now(expected, new)).await.map_err(|_| ControlError::Stopped)?
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dcr_protocol::{BaselineId, Held};

    fn record(version: u64, nonce: u8) -> CommitRecord {
        CommitRecord { held: Held { version, baseline: BaselineId([7; 16]) }, nonce: BaselineId([nonce; 16]) }
    }

    #[tokio::test]
    async fn swaps_only_from_what_was_expected() {
        let folder = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::new(folder.path().join("deep/record.json")).unwrap();
        assert_eq!(store.read().await.unwrap(), None);
        assert_eq!(store.compare_and_set(None, record(1, 1)).await.unwrap(), Swap::Done);
        assert_eq!(store.compare_and_set(None, record(1, 2)).await.unwrap(), Swap::Differs(Some(record(1, 1))));
        let stale = store.compare_and_set(Some(record(1, 2)), record(2, 3)).await.unwrap();
        assert_eq!(stale, Swap::Differs(Some(record(1, 1))), "same version, other nonce");
        assert_eq!(store.compare_and_set(Some(record(1, 1)), record(2, 3)).await.unwrap(), Swap::Done);
        assert_eq!(store.read().await.unwrap(), Some(record(2, 3)));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_of_many_writers_wins() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..20u8 {
            let path = folder.path().join(format!("{round}.json"));
            let writers = (0..8u8).map(|writer| {
                let store = EmbeddedStore::new(&path).unwrap();
                tokio::spawn(async move { store.compare_and_set(None, record(1, writer)).await.unwrap() })
            });
            let mut winners = 0;
            for writer in writers.collect::<Vec<_>>() {
                winners += usize::from(writer.await.unwrap() == Swap::Done);
            }
            assert_eq!(winners, 1, "round {round}");
        }
    }

    #[tokio::test]
    async fn a_damaged_file_and_a_folder_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        fs::write(&path, "{\"version\":").unwrap();
        let error = EmbeddedStore::new(&path).unwrap().read().await.unwrap_err().to_string();
        assert!(error.contains("record.json") && error.contains("not a commit record"), "{error}");
        let error = EmbeddedStore::new(folder.path()).unwrap_err().to_string();
        assert!(error.contains("folder"), "{error}");
    }
}
