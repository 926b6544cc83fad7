//! The trait between the engine and the network: what moves chunks between ranks.

use crate::error::Result;
use crate::schedule::Exchange;

/// Moves chunks for one rank.
pub trait Transport<B> {
    /// An exchange in flight.
    type Ticket;

    /// Starts all messages of `exchange` as one group, and counts their bytes. `outgoing` holds one
    /// buffer for each send, which covers at least the rows of its chunk.
    ///
    /// # Errors
    /// If a neighbour is known to be lost.
    fn start(&mut self, exchange: &Exchange, outgoing: Vec<B>) -> Result<Self::Ticket>;

    /// Waits until the exchange is complete, and returns the buffer of each receive, in order. A
    /// device's transport makes the stream wait instead.
    ///
    /// # Errors
    /// If a neighbour is lost.
    fn finish(&mut self, ticket: Self::Ticket) -> Result<Vec<B>>;

    /// Bytes that this rank has sent so far.
    fn bytes_sent(&self) -> u64;
}
