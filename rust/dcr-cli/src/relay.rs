//! `dcr relay`.

use std::fs;
use std::path::PathBuf;

use dcr_transport::{Relay, RelayAddress, RelayConfig, RunKey};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

#[derive(clap::Args)]
pub struct Arguments {
    /// Where to listen; port 0 picks a free one.
    #[arg(long, value_name = "tcp://HOST:PORT", default_value = "tcp://127.0.0.1:5551")]
    listen: RelayAddress,
    /// Most payload bytes that may be on their way at once.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30)]
    budget: u64,
    /// Runs without a run key; only for loopback addresses.
    #[arg(long)]
    insecure_loopback: bool,
    /// Writes the address that it listens on into this file once it does.
    #[arg(long, value_name = "FILE")]
    address_file: Option<PathBuf>,
}

pub fn run(arguments: Arguments) -> Result<(), String> {
    let key = RunKey::from_environment(&arguments.listen, arguments.insecure_loopback)
        .map_err(|error| format!("{error} (or --insecure-loopback)"))?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start threads: {error}"))?;
    runtime.block_on(async {
        let config = RelayConfig { listen: arguments.listen, key, budget: arguments.budget };
        let relay = Relay::bind(config).await.map_err(|error| error.to_string())?;
        println!("dcr relay listening on {}", relay.address());
        if let Some(file) = &arguments.address_file {
            write_whole(file, relay.address())
                .map_err(|error| format!("cannot write --address-file {}: {error}", file.display()))?;
        }
        let mut terminate =
            signal(SignalKind::terminate()).map_err(|error| format!("cannot wait for signals: {error}"))?;
        tokio::select! {
            result = relay.run() => result.map_err(|error| error.to_string()),
            _ = tokio::signal::ctrl_c() => Ok(()),
            _ = terminate.recv() => Ok(()),
        }
    })
}

/// Whoever waits for the file must never read half an address.
fn write_whole(file: &std::path::Path, text: &str) -> std::io::Result<()> {
    let draft = file.with_extension("new");
    fs::write(&draft, text)?;
    fs::rename(&draft, file)
}
