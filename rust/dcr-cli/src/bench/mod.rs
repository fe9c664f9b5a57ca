//! `dcr bench`: what this machine reaches, as ratios within one run.

mod construct;
mod rates;
mod trainer;

#[derive(clap::Subcommand)]
pub enum Bench {
    /// Delta construction: comparing, compacting and encoding, and, with --model, direct projection against full
    /// conversion.
    Construct(construct::Arguments),
}

pub fn run(bench: Bench) -> Result<(), String> {
    match bench {
        Bench::Construct(arguments) => construct::run(&arguments),
    }
}

/// The middle of some numbers; 0 without any.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => 0.0,
        len if len % 2 == 1 => numbers[middle],
        _ => f64::midpoint(numbers[middle - 1], numbers[middle]),
    }
}
