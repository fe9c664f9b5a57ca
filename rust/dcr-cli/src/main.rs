//! The `dcr` program: the relay process, run keys, a look into payload files, and measurements.

mod bench;
mod inspect;
mod key;
mod relay;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Delta-compressed refit: new policy weights into running vLLM servers, bit for bit.
#[derive(Parser)]
#[command(name = "dcr", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the relay that owners, receivers and the coordinator connect to.
    Relay(relay::Arguments),
    /// Makes a run key, the secret that all processes of a run share.
    Key(key::Arguments),
    /// Measures what this machine reaches.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Shows what a payload file holds.
    Inspect {
        /// The payload file.
        file: PathBuf,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_env("DCR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match arguments.command {
        Command::Relay(arguments) => relay::run(arguments),
        Command::Key(arguments) => key::run(&arguments),
        Command::Bench(bench) => bench::run(bench),
        Command::Inspect { file } => inspect::run(&file),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("dcr: {reason}");
            ExitCode::FAILURE
        }
    }
}
