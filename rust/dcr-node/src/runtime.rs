//! What every node has: a runtime of its own, its endpoint, and the cell that says what it holds.

use std::env;
use std::sync::Arc;
use std::time::Duration;

use dcr_protocol::PeerName;
use dcr_transport::{Endpoint, EndpointEvent, HeldCell, RelayAddress, RunKey};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::NodeError;

/// Environment variable with the relay's address.
const RELAY_ENV: &str = "DCR_RELAY";

/// How to reach the relay.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its address.
    pub relay: RelayAddress,
    /// The run key.
    pub key: RunKey,
}

impl Link {
    /// From an address and the environment; `DCR_RELAY` stands in for a missing address.
    pub fn from_environment(relay: Option<&str>) -> Result<Self, NodeError> {
        let relay = match relay {
            Some(relay) => relay.to_owned(),
            None => env::var(RELAY_ENV)
                .map_err(|_| NodeError::NoRelay(format!("no relay given: set {RELAY_ENV} to tcp://HOST:PORT")))?,
        };
        let relay: RelayAddress = relay.parse()?;
        let key = RunKey::from_environment(&relay, false)?;
        Ok(Self { relay, key })
    }
}

/// A node's connection and the threads under it.
pub(crate) struct Connection {
    runtime: Option<Runtime>,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) held: HeldCell,
}

impl Connection {
    /// Runs a task until it ends or the connection is dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(task);
        }
    }

    /// Waits for a future on the calling thread.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.runtime.as_ref().map(|runtime| runtime.block_on(future))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Gives queued frames a moment to leave; a call that hangs (a gate) must not hold up the caller.
            runtime.shutdown_timeout(Duration::from_millis(300));
        }
    }
}

/// Starts a runtime and the endpoint on it.
pub(crate) fn connect(
    link: &Link,
    name: PeerName,
) -> Result<(Connection, UnboundedReceiver<EndpointEvent>), NodeError> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("dcr")
        .enable_all()
        .build()
        .map_err(|source| NodeError::System { doing: "start dcr's threads", source })?;
    let held = HeldCell::default();
    let _inside = runtime.enter();
    let (endpoint, events) = Endpoint::start(link.relay.clone(), link.key.clone(), name, Arc::clone(&held));
    drop(_inside);
    Ok((Connection { runtime: Some(runtime), endpoint: Arc::new(endpoint), held }, events))
}
