//! `dcr bench construct`.

use serde_json::{Value, json};

use super::{rates, trainer};

#[derive(clap::Args)]
pub struct Arguments {
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Megabytes (2^20 bytes) of BF16 values that are compared with as many.
    #[arg(long, value_name = "MB", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=65536))]
    megabytes: u64,
    /// Percent of elements that change.
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    percent: f64,
    /// Threads; 0 takes one for each core. One thread is always measured too.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Times that everything is measured; medians are told.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    #[command(flatten)]
    trainer: trainer::Arguments,
}

pub fn run(arguments: &Arguments) -> Result<(), String> {
    if !(0.0..=100.0).contains(&arguments.percent) {
        return Err(format!("--percent {} is not between 0 and 100", arguments.percent));
    }
    let bytes = usize::try_from(arguments.megabytes << 20).map_err(|_| "--megabytes is too large".to_owned())?;
    let share = arguments.percent / 100.0;
    let rates = rates::measure(bytes, share, arguments.threads, arguments.rounds)?;
    let model = trainer::measure(&arguments.trainer, share, arguments.rounds)?;
    let report = json!({ "rates": rates, "model": model });
    if arguments.json {
        println!("{report}");
    } else {
        print_rates(&report["rates"]);
        print_model(&report["model"]);
    }
    Ok(())
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(f64::NAN)
}

fn print_rates(rates: &Value) {
    println!(
        "{} MB of BF16 values, {:.2}% changed, medians of {} rounds; GB/s of both buffers read",
        rates["megabytes"],
        100.0 * number(rates, "share"),
        rates["rounds"]
    );
    for run in rates["runs"].as_array().into_iter().flatten() {
        println!(
            "{:>2} thread(s): read both buffers {:6.1} GB/s   compare and compact {:6.1} GB/s = {:3.0}% of reading   \
             construct (also encode, zstd, digest) {:6.1} GB/s",
            run["threads"],
            number(run, "read_gb_s"),
            number(run, "compare_gb_s"),
            100.0 * number(run, "compare_of_read"),
            number(run, "construct_gb_s"),
        );
    }
    println!("payload: {:.2} bits for each changed element", number(rates, "bits_per_change"));
}

fn print_model(model: &Value) {
    if model.is_null() {
        println!("no --model: direct projection was not compared with full conversion");
        return;
    }
    println!(
        "\n{} on {} ranks: {:.1} MB, {:.2}% of elements changed in each refit, medians of {} rounds",
        model["model"].as_str().unwrap_or(""),
        model["ranks"],
        number(model, "checkpoint_bytes") / 1e6,
        100.0 * number(model, "changed_share"),
        model["rounds"],
    );
    println!("mode                                      seconds  convert  compare   encode   payload");
    for mode in model["modes"].as_array().into_iter().flatten() {
        println!(
            "{}  {:<38} {:7.3}  {:7.3}  {:7.3}  {:7.3}  {:>10} B",
            mode["mode"].as_str().unwrap_or(""),
            mode["what"].as_str().unwrap_or(""),
            number(mode, "seconds"),
            number(mode, "convert_s"),
            number(mode, "compare_s"),
            number(mode, "encode_s"),
            mode["payload_bytes"],
        );
    }
    println!("{}", model["note"].as_str().unwrap_or(""));
    println!(
        "direct projection is {:.2} x faster than full conversion (F over P); XOR payloads are {:.0}% smaller (X to P)",
        number(model, "full_over_projected"),
        100.0 * number(model, "xor_saves"),
    );
}
