//! The relay: one ROUTER that knows its peers, forwards their frames and counts what is on its way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::TcpListener;

use bytes::Bytes;
use dcr_protocol::{AttemptId, Envelope, Held, Message, PROTOCOL_VERSION, PayloadKey, PeerInfo, PeerName, Role};
use futures::StreamExt;
use tokio::time::Instant;
use tracing::{debug, info, warn};
use zeromq::{RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend};

use crate::{Frame, FrameError, HEARTBEAT, RelayAddress, RunKey, SILENCE, TransportError};

/// How a relay runs.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// Where to listen; port 0 picks a free one.
    pub listen: RelayAddress,
    /// The run key.
    pub key: RunKey,
    /// Most payload bytes that may be on their way at once. Owners' windows keep far below it; an owner that
    /// does not keep its window fails the attempt here instead of filling the memory.
    pub budget: u64,
}

/// A bound relay.
pub struct Relay {
    config: RelayConfig,
    address: String,
    socket: RouterSocket,
}

struct Peer {
    name: PeerName,
    session: u64,
    sequence: u64,
    held: Option<Held>,
    heard: Instant,
}

#[derive(Default)]
struct Route {
    attempt: Option<AttemptId>,
    receivers: BTreeSet<PeerName>,
    pending: BTreeMap<PayloadKey, (u64, BTreeSet<PeerName>)>,
    bytes: u64,
    overflowed: bool,
}

struct Running {
    key: RunKey,
    budget: u64,
    send: RouterSendHalf,
    session: u64,
    sequence: u64,
    peers: HashMap<Bytes, Peer>,
    names: HashMap<PeerName, Bytes>,
    route: Route,
}

impl Relay {
    /// Listens.
    pub async fn bind(config: RelayConfig) -> Result<Self, TransportError> {
        let address = config.listen.to_string();
        let failed = |reason: String| TransportError::Listen { address: address.clone(), reason };
        // The library sets SO_REUSEADDR-like options on some platforms; a plain bind says "in use" reliably.
        if let Err(error) = TcpListener::bind(address.trim_start_matches("tcp://")) {
            let hint = match error.kind() {
                std::io::ErrorKind::AddrInUse => "the port is in use: stop what listens there or choose another",
                _ => "check the address",
            };
            return Err(failed(format!("{error}; {hint}")));
        }
        let mut socket = RouterSocket::new();
        let bound = socket.bind(&address).await.map_err(|error| failed(error.to_string()))?;
        Ok(Self { address: bound.to_string(), config, socket })
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Forwards until the socket breaks; dropping the future closes all connections.
    pub async fn run(mut self) -> Result<(), TransportError> {
        info!(address = %self.address, "relay listening");
        let mut monitor = self.socket.monitor();
        let (send, mut receive) = self.socket.split();
        let mut running = Running {
            key: self.config.key,
            budget: self.config.budget,
            send,
            session: rand::random(),
            sequence: 0,
            peers: HashMap::new(),
            names: HashMap::new(),
            route: Route::default(),
        };
        let mut tick = tokio::time::interval(HEARTBEAT);
        loop {
            tokio::select! {
                frame = next_frame(&mut receive) => {
                    let (identity, parts) = frame?;
                    running.frame(identity, parts).await;
                }
                event = monitor.next() => {
                    if let Some(SocketEvent::Disconnected(identity)) = event {
                        running.disconnected(&Bytes::from(identity), "its connection ended").await;
                    }
                }
                _ = tick.tick() => running.drop_silent().await,
            }
        }
    }
}

async fn next_frame(receive: &mut RouterRecvHalf) -> Result<(Bytes, Vec<Bytes>), TransportError> {
    loop {
        let message = receive.recv().await.map_err(|error| TransportError::Socket(error.to_string()))?;
        let mut parts = message.into_vec();
        if !parts.is_empty() {
            let identity = parts.remove(0);
            return Ok((identity, parts));
        }
    }
}

impl Running {
    async fn frame(&mut self, identity: Bytes, parts: Vec<Bytes>) {
        let frame = match Frame::open(&self.key, parts) {
            Ok(frame) => frame,
            Err(error) => {
                warn!(%error, "dropped a frame");
                if error == FrameError::Tag && !self.peers.contains_key(&identity) {
                    // Signed with our key: the other side sees that the keys differ.
                    self.answer(&identity, Message::Refused { reason: error.to_string() }).await;
                }
                return;
            }
        };
        let Envelope { from, session, sequence, message, .. } = &frame.envelope;
        if let Message::Hello { protocol, held } = message {
            let (name, session, protocol, held) = (from.clone(), *session, *protocol, *held);
            return self.hello(identity, name, session, protocol, held).await;
        }
        match self.peers.get_mut(&identity) {
            Some(peer) if peer.name == *from && peer.session == *session && *sequence > peer.sequence => {
                peer.sequence = *sequence;
                peer.heard = Instant::now();
            }
            Some(peer) => {
                return warn!(peer = %peer.name, %from, "dropped a frame with a wrong sender or sequence");
            }
            None => {
                let reason = "say Hello first".to_owned();
                return self.answer(&identity, Message::Refused { reason }).await;
            }
        }
        if !from.role().is_some_and(|role| message.allowed_from(role)) {
            return warn!(%from, ?message, "dropped a message that this peer may not send");
        }
        self.message(identity, frame).await;
    }

    async fn hello(&mut self, identity: Bytes, name: PeerName, session: u64, protocol: u16, held: Option<Held>) {
        let refusal = if protocol != PROTOCOL_VERSION {
            Some(format!(
                "{name} speaks protocol {protocol} and this relay {PROTOCOL_VERSION}: install the same dcr everywhere"
            ))
        } else if PeerName::new(name.as_str()).is_none() || name.role() == Some(Role::Relay) {
            Some(format!("`{name}` is not a name of an owner, a receiver or a coordinator"))
        } else if self.names.contains_key(&name) {
            Some(format!("{name} is connected already: two training runs must not share a relay"))
        } else {
            None
        };
        if let Some(reason) = refusal {
            warn!(%name, %reason, "refused");
            return self.answer(&identity, Message::Refused { reason }).await;
        }
        info!(peer = %name, "connected");
        self.names.insert(name.clone(), identity.clone());
        let peer = Peer { name, session, sequence: 1, held, heard: Instant::now() };
        self.peers.insert(identity.clone(), peer);
        self.answer(&identity, Message::Welcome).await;
        self.roster().await;
    }

    async fn message(&mut self, identity: Bytes, frame: Frame) {
        let from = frame.envelope.from.clone();
        match &frame.envelope.message {
            Message::Heartbeat => self.answer(&identity, Message::Heartbeat).await,
            Message::Holding { held } => {
                if let Some(peer) = self.peers.get_mut(&identity) {
                    peer.held = *held;
                }
                self.roster().await;
            }
            Message::Route { attempt, receivers } => {
                let receivers = receivers.iter().cloned().collect();
                self.route = Route { attempt: Some(*attempt), receivers, ..Route::default() };
            }
            Message::Payload { attempt, key } => {
                let (attempt, key) = (*attempt, *key);
                self.payload(&from, attempt, key, frame).await;
            }
            Message::PayloadTaken { attempt, key } => self.taken(&from, *attempt, *key).await,
            Message::Stop { attempt, .. } => {
                if self.route.attempt == Some(*attempt) {
                    self.route = Route::default();
                }
                self.forward(&frame).await;
            }
            _ => self.forward(&frame).await,
        }
    }

    async fn payload(&mut self, from: &PeerName, attempt: AttemptId, key: PayloadKey, frame: Frame) {
        let bytes = frame.body.as_ref().map_or(0, Bytes::len) as u64;
        if self.route.attempt != Some(attempt) || from.owner_index() != Some(key.owner) || self.route.overflowed {
            return debug!(%from, %attempt, "dropped a payload of no current attempt");
        }
        if self.route.bytes + bytes > self.budget {
            self.route.overflowed = true;
            let reason = format!(
                "the relay's budget of {} bytes is exceeded by {from}: give the relay a larger --budget or owners \
                 a smaller window",
                self.budget
            );
            return self.to(&PeerName::coordinator(), Message::AttemptFailed { attempt, reason }).await;
        }
        let receivers = self.route.receivers.clone();
        for receiver in &receivers {
            self.forward_to(receiver, &frame).await;
        }
        if self.route.pending.insert(key, (bytes, receivers)).is_none() {
            self.route.bytes += bytes;
        }
    }

    async fn taken(&mut self, from: &PeerName, attempt: AttemptId, key: PayloadKey) {
        if self.route.attempt != Some(attempt) {
            return;
        }
        let Some((bytes, waiting)) = self.route.pending.get_mut(&key) else {
            return;
        };
        waiting.remove(from);
        if waiting.is_empty() {
            self.route.bytes -= *bytes;
            self.route.pending.remove(&key);
            self.to(&PeerName::owner(key.owner), Message::PayloadTaken { attempt, key }).await;
        }
    }

    async fn forward(&mut self, frame: &Frame) {
        let to = match frame.envelope.to.as_slice() {
            [] => self.route.receivers.iter().cloned().collect(),
            to => to.to_vec(),
        };
        for name in to.iter().filter(|name| name.role() != Some(Role::Relay)) {
            self.forward_to(name, frame).await;
        }
    }

    async fn forward_to(&mut self, name: &PeerName, frame: &Frame) {
        match self.names.get(name) {
            Some(identity) => {
                if let Err(error) = self.send.send(frame.message(Some(identity))).await {
                    debug!(peer = %name, %error, "cannot forward");
                }
            }
            None => debug!(peer = %name, "not connected: dropped a frame for it"),
        }
    }

    async fn to(&mut self, name: &PeerName, message: Message) {
        if let Some(identity) = self.names.get(name).cloned() {
            self.answer(&identity, message).await;
        }
    }

    async fn answer(&mut self, identity: &Bytes, message: Message) {
        self.sequence += 1;
        let envelope = Envelope {
            from: PeerName::relay(),
            session: self.session,
            sequence: self.sequence,
            to: Vec::new(),
            message,
        };
        match Frame::seal(&self.key, envelope, None) {
            Ok(frame) => {
                if let Err(error) = self.send.send(frame.message(Some(identity))).await {
                    debug!(%error, "cannot answer");
                }
            }
            Err(error) => warn!(%error, "cannot seal an answer"),
        }
    }

    async fn roster(&mut self) {
        let peers = self.peers.values();
        let peers = peers.map(|Peer { name, session, held, .. }| PeerInfo {
            name: name.clone(),
            session: *session,
            held: *held,
        });
        let message = Message::Roster { peers: peers.collect() };
        self.to(&PeerName::coordinator(), message).await;
    }

    async fn disconnected(&mut self, identity: &Bytes, why: &str) {
        let Some(peer) = self.peers.remove(identity) else {
            return;
        };
        info!(peer = %peer.name, why, "gone");
        self.names.remove(&peer.name);
        self.roster().await;
    }

    async fn drop_silent(&mut self) {
        let silent = self.peers.iter().filter(|(_, peer)| peer.heard.elapsed() > SILENCE);
        for identity in silent.map(|(identity, _)| identity.clone()).collect::<Vec<_>>() {
            self.disconnected(&identity, "it fell silent").await;
        }
    }
}
