//! Addresses of relays.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::TransportError;

/// A relay's address, `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayAddress {
    host: String,
    port: u16,
}

impl RelayAddress {
    /// Whether the host is a loopback address, by its text alone: a name other than `localhost` is not trusted.
    pub fn is_loopback(&self) -> bool {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl FromStr for RelayAddress {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |reason| TransportError::Address { address: text.to_owned(), reason };
        let rest = text.strip_prefix("tcp://").ok_or_else(|| wrong("only tcp is supported"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("the port is missing"))?;
        if host.is_empty() || host.chars().any(|c| c.is_whitespace() || c == '/') {
            return Err(wrong("the host is missing or not a host"));
        }
        let port = port.parse().map_err(|_| wrong("the port is not a number from 0 to 65535"))?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for RelayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reads_addresses_and_says_what_is_wrong() {
        let address: RelayAddress = "tcp://10.1.2.3:5000".parse().unwrap();
        assert_eq!((address.to_string().as_str(), address.is_loopback()), ("tcp://10.1.2.3:5000", false));
        for loopback in ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.9.9.9:1"] {
            assert!(loopback.parse::<RelayAddress>().unwrap().is_loopback(), "{loopback}");
        }
        for (text, part) in [
            ("10.1.2.3:5000", "only tcp"),
            ("tcp://host", "port is missing"),
            ("tcp://:5", "host is missing"),
            ("tcp://host:99999", "not a number"),
        ] {
            let error = text.parse::<RelayAddress>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("tcp://HOST:PORT"), "{error}");
        }
    }
}
