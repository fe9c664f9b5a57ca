//! The request gate: vLLM's pause and resume, so that no request sees partly applied weights (section 7.2).

use std::time::Duration;

use ureq::Agent;

/// The gates of all rollout servers, closed and opened together.
#[derive(Clone, Debug)]
pub struct Gate {
    servers: Vec<String>,
    deadline: Duration,
}

impl Gate {
    /// Gates of the servers with these base URLs. Each call to one may take `deadline`.
    pub fn new(servers: impl IntoIterator<Item = String>, deadline: Duration) -> Self {
        let servers = servers.into_iter().map(|server| server.trim_end_matches('/').to_owned()).collect();
        Self { servers, deadline }
    }

    /// Holds new requests, lets running ones finish, clears prefix and other caches. Blocks.
    pub fn close(&self) -> Result<(), String> {
        self.all("pause?mode=wait&clear_cache=true")
    }

    /// Lets requests in again. Blocks.
    pub fn open(&self) -> Result<(), String> {
        self.all("resume")
    }

    /// Calls every server at the same time; the first failure is the answer.
    fn all(&self, call: &str) -> Result<(), String> {
        std::thread::scope(|scope| {
            let calls: Vec<_> =
                self.servers.iter().map(|server| scope.spawn(move || self.post(server, call))).collect();
            let answers = calls
                .into_iter()
                .map(|call| call.join().unwrap_or_else(|_| Err("the call to a server ended unexpectedly".to_owned())));
            answers.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn post(&self, server: &str, call: &str) -> Result<(), String> {
        let config = Agent::config_builder().timeout_global(Some(self.deadline)).http_status_as_error(false).build();
        let answer = Agent::new_with_config(config).post(format!("{server}/{call}")).send_empty();
        let mut answer = answer.map_err(|error| format!("vLLM server {server}: {error}"))?;
        match answer.status().as_u16() {
            200..300 => Ok(()),
            404 => Err(format!("vLLM server {server} has no /{call}: start it with VLLM_SERVER_DEV_MODE=1")),
            status => {
                let body = answer.body_mut().read_to_string().unwrap_or_default();
                let line: String = body.chars().filter(|c| !c.is_control()).take(300).collect();
                Err(format!("vLLM server {server} answered {status} to /{call}: {line}"))
            }
        }
    }
}
