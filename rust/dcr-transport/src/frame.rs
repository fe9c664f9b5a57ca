//! One frame: an envelope, its tag and, for payloads, a body.
//!
//! The tag covers the envelope (sender, session, sequence, attempt) and the fixed header of the body, which in turn
//! holds the digest of the rest. So a relay forwards payloads without hashing them.

use bytes::Bytes;
use dcr_core::payload::HEADER_LEN;
use dcr_protocol::Envelope;
use thiserror::Error;
use zeromq::ZmqMessage;

use crate::RunKey;

/// Why a frame is not taken.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// Not the parts of a dcr frame.
    #[error("not a dcr frame ({0} parts)")]
    Parts(usize),
    /// The tag is not the one that the run key makes.
    #[error("not signed with this run key: give every process the same {}", crate::KEY_FILE_ENV)]
    Tag,
    /// The envelope cannot be read.
    #[error("the envelope is not understood ({0}): are all processes of the same dcr version?")]
    Envelope(String),
}

/// A checked frame, kept as it came so that it can be forwarded unchanged.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Who says what to whom.
    pub envelope: Envelope,
    /// The payload, for payload messages.
    pub body: Option<Bytes>,
    header: Bytes,
    tag: Bytes,
}

fn covered(body: Option<&Bytes>) -> &[u8] {
    body.map_or(&[], |body| &body[..body.len().min(HEADER_LEN)])
}

impl Frame {
    /// Signs an envelope and a body.
    pub fn seal(key: &RunKey, envelope: Envelope, body: Option<Bytes>) -> Result<Self, FrameError> {
        let header = serde_json::to_vec(&envelope).map_err(|error| FrameError::Envelope(error.to_string()))?;
        let tag = key.tag(&[&header, covered(body.as_ref())]).ok_or(FrameError::Tag)?;
        Ok(Self { envelope, body, header: header.into(), tag: Bytes::copy_from_slice(&tag) })
    }

    /// Checks and reads the parts of a frame, without a leading identity.
    pub fn open(key: &RunKey, parts: Vec<Bytes>) -> Result<Self, FrameError> {
        let count = parts.len();
        let mut parts = parts.into_iter();
        let (Some(header), Some(tag), body, None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            return Err(FrameError::Parts(count));
        };
        if !key.verifies(&[&header, covered(body.as_ref())], &tag) {
            return Err(FrameError::Tag);
        }
        let envelope = serde_json::from_slice(&header).map_err(|error| FrameError::Envelope(error.to_string()))?;
        Ok(Self { envelope, body, header, tag })
    }

    /// The frame as a ZeroMQ message, with the identity of the peer it goes to in front when there is one.
    pub(crate) fn message(&self, identity: Option<&Bytes>) -> ZmqMessage {
        let mut message = ZmqMessage::from(self.header.clone());
        message.push_back(self.tag.clone());
        if let Some(body) = &self.body {
            message.push_back(body.clone());
        }
        if let Some(identity) = identity {
            message.push_front(identity.clone());
        }
        message
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dcr_protocol::{AttemptId, Message, PayloadKey, PeerName};

    fn sample() -> (RunKey, Frame) {
        let envelope = Envelope {
            from: PeerName::owner(1),
            session: 7,
            sequence: 3,
            to: vec![],
            message: Message::Payload { attempt: AttemptId([9; 16]), key: PayloadKey { sequence: 0, owner: 1 } },
        };
        let key = RunKey::new([5; 32]);
        let body = Bytes::from(vec![0xaa; HEADER_LEN + 10]);
        (key.clone(), Frame::seal(&key, envelope, Some(body)).unwrap())
    }

    #[test]
    fn opens_what_was_sealed_and_nothing_else() {
        let (key, frame) = sample();
        let parts = frame.message(None).into_vec();
        assert_eq!(Frame::open(&key, parts.clone()).unwrap().envelope, frame.envelope);
        assert_eq!(Frame::open(&RunKey::new([6; 32]), parts.clone()).unwrap_err(), FrameError::Tag);
        for part in 0..parts.len() {
            for byte in 0..parts[part].len().min(HEADER_LEN) {
                let mut broken = parts.clone();
                let mut bytes = broken[part].to_vec();
                bytes[byte] ^= 1;
                broken[part] = bytes.into();
                assert_eq!(Frame::open(&key, broken).unwrap_err(), FrameError::Tag, "part {part} byte {byte}");
            }
        }
        assert_eq!(Frame::open(&key, parts[..1].to_vec()).unwrap_err(), FrameError::Parts(1));
        assert_eq!(Frame::open(&key, parts[..2].to_vec()).unwrap_err(), FrameError::Tag);
    }
}
