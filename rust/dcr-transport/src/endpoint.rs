//! A peer's side of its connection to the relay: one supervised DEALER.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcr_protocol::{Envelope, Held, Message, PROTOCOL_VERSION, PeerName};
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};
use zeromq::util::PeerIdentity;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend};

use crate::{Frame, HEARTBEAT, RelayAddress, RunKey, SILENCE};

const CONNECT: Duration = Duration::from_secs(5);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// What the peer holds now; told to the relay whenever a connection stands.
pub type HeldCell = Arc<Mutex<Option<Held>>>;

/// Something to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// To whom; empty: to the attempt's required receivers.
    pub to: Vec<PeerName>,
    /// What.
    pub message: Message,
    /// The payload, for payload messages.
    pub body: Option<Bytes>,
}

/// What an endpoint reports.
#[derive(Debug)]
pub enum EndpointEvent {
    /// The relay has taken the connection.
    Connected,
    /// There is no connection, for this reason; the supervisor keeps trying.
    Lost(String),
    /// A frame arrived.
    Frame(Box<Frame>),
}

/// The connection of one peer to the relay. Dropping it closes the connection.
pub struct Endpoint {
    outgoing: mpsc::UnboundedSender<Outgoing>,
}

impl Endpoint {
    /// Starts the supervisor on the current tokio runtime.
    pub fn start(
        relay: RelayAddress,
        key: RunKey,
        name: PeerName,
        held: HeldCell,
    ) -> (Self, mpsc::UnboundedReceiver<EndpointEvent>) {
        let (outgoing, outgoing_rx) = mpsc::unbounded_channel();
        let (events, events_rx) = mpsc::unbounded_channel();
        let supervisor = Supervisor { relay, key, name, held, events, session: 0, sequence: 0 };
        tokio::spawn(supervisor.run(outgoing_rx));
        (Self { outgoing }, events_rx)
    }

    /// Queues a message. Without a connection it is dropped: only acknowledgements count.
    pub fn send(&self, outgoing: Outgoing) {
        // A closed channel means that the runtime is going down.
        let _ = self.outgoing.send(outgoing);
    }
}

struct Supervisor {
    relay: RelayAddress,
    key: RunKey,
    name: PeerName,
    held: HeldCell,
    events: mpsc::UnboundedSender<EndpointEvent>,
    session: u64,
    sequence: u64,
}

enum Closed {
    ByUs,
    Lost(String),
}

impl Supervisor {
    async fn run(mut self, mut outgoing: mpsc::UnboundedReceiver<Outgoing>) {
        let mut backoff = BACKOFF_MIN;
        let mut told = String::new();
        loop {
            match self.connection(&mut outgoing, &mut backoff).await {
                Closed::ByUs => return,
                Closed::Lost(reason) => {
                    if reason != told {
                        debug!(peer = %self.name, %reason, "no connection to the relay");
                        told.clone_from(&reason);
                    }
                    if self.events.send(EndpointEvent::Lost(reason)).is_err() {
                        return;
                    }
                }
            }
            sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
            while let Ok(stale) = outgoing.try_recv() {
                debug!(peer = %self.name, message = ?stale.message, "dropped: no connection to the relay");
            }
            if outgoing.is_closed() {
                return;
            }
        }
    }

    /// One connection, from connecting to its end.
    async fn connection(&mut self, outgoing: &mut mpsc::UnboundedReceiver<Outgoing>, backoff: &mut Duration) -> Closed {
        self.session = rand::random();
        self.sequence = 0;
        let identity = format!("{}#{:016x}", self.name, self.session);
        let Ok(identity) = identity.parse::<PeerIdentity>() else {
            return Closed::Lost(format!("the name {} is too long", self.name));
        };
        let mut options = SocketOptions::default();
        options.peer_identity(identity);
        options.connect_timeout(CONNECT);
        let mut socket = DealerSocket::with_options(options);
        let mut monitor = socket.monitor();
        if let Err(error) = socket.connect(&self.relay.to_string()).await {
            let reason = format!(
                "no relay answers at {} ({error}): start `dcr relay --listen {}` or check the address",
                self.relay, self.relay
            );
            return Closed::Lost(reason);
        }
        let (mut send, mut receive) = socket.split();
        let hello = Message::Hello { protocol: PROTOCOL_VERSION, held: *self.held.lock() };
        if let Err(reason) = self.send(&mut send, vec![PeerName::relay()], hello, None).await {
            return Closed::Lost(reason);
        }
        let answer = match timeout(CONNECT, receive.recv()).await {
            Ok(Ok(message)) => Frame::open(&self.key, message.into_vec()),
            Ok(Err(error)) => {
                return Closed::Lost(format!("the relay at {} hung up: {error}", self.relay));
            }
            Err(_) => {
                return Closed::Lost(format!("{} does not answer as a dcr relay", self.relay));
            }
        };
        match answer.map(|frame| frame.envelope.message) {
            Ok(Message::Welcome) => {}
            Ok(Message::Refused { reason }) => {
                return Closed::Lost(format!("the relay refuses: {reason}"));
            }
            Ok(other) => {
                return Closed::Lost(format!("the relay at {} says {other:?} to Hello", self.relay));
            }
            Err(error) => {
                return Closed::Lost(format!("the answer of the relay at {} is {error}", self.relay));
            }
        }
        *backoff = BACKOFF_MIN;
        if self.events.send(EndpointEvent::Connected).is_err() {
            return Closed::ByUs;
        }

        let mut seen: HashMap<PeerName, (u64, u64)> = HashMap::new();
        let mut heard = Instant::now();
        let mut tick = tokio::time::interval(HEARTBEAT);
        loop {
            tokio::select! {
                next = outgoing.recv() => {
                    let Some(Outgoing { to, message, body }) = next else {
                        // The library may drop what is queued when a socket closes; give it a moment.
                        sleep(Duration::from_millis(100)).await;
                        return Closed::ByUs;
                    };
                    if let Err(reason) = self.send(&mut send, to, message, body).await {
                        return Closed::Lost(reason);
                    }
                }
                next = receive.recv() => {
                    let frame = match next {
                        Ok(message) => Frame::open(&self.key, message.into_vec()),
                        Err(error) => return Closed::Lost(format!("the relay at {} hung up: {error}", self.relay)),
                    };
                    heard = Instant::now();
                    match frame {
                        Ok(frame) if matches!(frame.envelope.message, Message::Heartbeat | Message::Welcome) => {}
                        Ok(frame) => {
                            let Envelope { from, session, sequence, .. } = &frame.envelope;
                            let last = seen.entry(from.clone()).or_insert((*session, 0));
                            if last.0 == *session && *sequence <= last.1 {
                                warn!(peer = %self.name, %from, "dropped a repeated frame");
                                continue;
                            }
                            *last = (*session, *sequence);
                            if self.events.send(EndpointEvent::Frame(Box::new(frame))).is_err() {
                                return Closed::ByUs;
                            }
                        }
                        Err(error) => warn!(peer = %self.name, %error, "dropped a frame"),
                    }
                }
                event = monitor.next() => {
                    if let Some(SocketEvent::Disconnected(_)) = event {
                        return Closed::Lost(format!("the relay at {} closed the connection", self.relay));
                    }
                }
                _ = tick.tick() => {
                    if heard.elapsed() > SILENCE {
                        return Closed::Lost(format!("nothing heard from the relay at {} for {SILENCE:?}", self.relay));
                    }
                    let to = vec![PeerName::relay()];
                    if let Err(reason) = self.send(&mut send, to, Message::Heartbeat, None).await {
                        return Closed::Lost(reason);
                    }
                }
            }
        }
    }

    async fn send(
        &mut self,
        socket: &mut (impl SocketSend + Send),
        to: Vec<PeerName>,
        message: Message,
        body: Option<Bytes>,
    ) -> Result<(), String> {
        self.sequence += 1;
        let (session, sequence) = (self.session, self.sequence);
        let envelope = Envelope { from: self.name.clone(), session, sequence, to, message };
        let frame = Frame::seal(&self.key, envelope, body).map_err(|error| error.to_string())?;
        let sent = socket.send(frame.message(None)).await;
        sent.map_err(|error| format!("cannot send to the relay at {}: {error}", self.relay))
    }
}
