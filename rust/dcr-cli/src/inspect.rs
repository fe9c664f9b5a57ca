//! `dcr inspect`.

use std::fs;
use std::path::Path;

use dcr_core::payload::{self, Positions};

pub fn run(path: &Path) -> Result<(), String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = fs::read(path).map_err(|error| wrong(&error))?;
    let header = payload::peek(&bytes).map_err(|error| wrong(&error))?;
    let payload = payload::decode(&bytes).map_err(|error| wrong(&error))?;
    println!(
        "attempt {}  owner {}  sequence {}  {} bytes, {} uncompressed  digest {}",
        hex::encode(header.id.attempt),
        header.id.owner,
        header.id.sequence,
        bytes.len(),
        header.uncompressed_len,
        hex::encode(header.digest),
    );
    println!("{:<10} {:<5} {:>12} {:>12}  {:<8} tensor", "encoding", "dtype", "elements", "entries", "location");
    for item in &payload.items {
        let location = match item.positions {
            Positions::Run { .. } => "run",
            Positions::Scattered(_) => "gaps",
        };
        println!(
            "{:<10} {:<5} {:>12} {:>12}  {location:<8} {} {:?}",
            item.encoding.name(),
            item.meta.dtype.name(),
            item.meta.numel().unwrap_or(0),
            item.positions.count(),
            item.meta.name,
            item.meta.shape,
        );
    }
    Ok(())
}
