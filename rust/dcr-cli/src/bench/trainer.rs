//! Direct projection against full conversion, on training ranks that run dcr's Python package.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

#[derive(clap::Args)]
pub struct Arguments {
    /// A function of no arguments, MODULE:FUNCTION, that returns a Megatron Bridge and its model on each rank.
    #[arg(long, value_name = "MODULE:FUNCTION")]
    model: Option<String>,
    /// Training ranks to start.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// The Python to run them with; by default the one that lies beside this program, else python3 on PATH.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

/// What the ranks measured; null without a model.
pub fn measure(arguments: &Arguments, share: f64, rounds: u32) -> Result<Value, String> {
    let Some(model) = &arguments.model else { return Ok(Value::Null) };
    let python = arguments.python.clone().map_or_else(beside, OsString::from);
    let port = free_port()?;
    let mut ranks = Ranks(Vec::new());
    for rank in 0..arguments.ranks {
        let mut command = Command::new(&python);
        command.args(["-m", "dcr_training.bench", model]);
        command.args(["--share", &share.to_string(), "--rounds", &rounds.to_string()]);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", arguments.ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        let child = command.spawn().map_err(|error| format!("cannot run {}: {error}", python.to_string_lossy()))?;
        ranks.0.push(child);
    }
    let answer = ranks.answer()?;
    let last = answer.lines().rev().find(|line| line.starts_with('{')).unwrap_or_default();
    serde_json::from_str(last).map_err(|error| format!("training rank 0 gave no result ({error}): see its output"))
}

fn beside() -> OsString {
    let folder = std::env::current_exe().ok().and_then(|program| program.parent().map(PathBuf::from));
    let found = folder.map(|folder| folder.join("python3")).filter(|python| python.exists());
    found.map_or_else(|| OsString::from("python3"), OsString::from)
}

fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).map_err(|error| format!("cannot find a free port: {error}"))
}

/// Started ranks; none outlives this program's interest in them.
struct Ranks(Vec<Child>);

impl Ranks {
    /// What rank 0 printed, once all have ended well.
    fn answer(&mut self) -> Result<String, String> {
        let mut output = self.0.first_mut().and_then(|first| first.stdout.take());
        let mut text = String::new();
        if let Some(output) = &mut output {
            std::io::Read::read_to_string(output, &mut text)
                .map_err(|error| format!("cannot read what training rank 0 prints: {error}"))?;
        }
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = child.wait().map_err(|error| format!("training rank {rank} is lost: {error}"))?;
            if !status.success() {
                return Err(format!("training rank {rank} ended with {status}: see its output"));
            }
        }
        Ok(text)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Those that have ended are reaped already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
