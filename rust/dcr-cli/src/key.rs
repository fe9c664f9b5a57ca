//! `dcr key`.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Arguments {
    /// Writes the key into this new file, readable by its owner alone, instead of printing it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<(), String> {
    let key = hex::encode(rand::random::<[u8; 32]>());
    let Some(path) = &arguments.out else {
        println!("{key}");
        return Ok(());
    };
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{key}").and_then(|()| file.sync_all()));
    written.map_err(|error| format!("cannot write the run key to {}: {error}", path.display()))?;
    println!("wrote {}: copy it to every machine and set DCR_RUN_KEY_FILE to its path", path.display());
    Ok(())
}
