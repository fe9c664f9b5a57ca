//! Moving payloads and control frames: authenticated frames, endpoints and the relay over ZeroMQ.
