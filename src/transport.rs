//! What moves chunks between ranks: the trait between the engine and the network.

use crate::error::Result;
use crate::schedule::Exchange;

/// Moves chunks for one rank.
pub trait Transport<B> {
    /// An exchange in flight.
    type Ticket;

    /// Starts all messages of `exchange` as one group. `outgoing` holds one buffer for each send;
    /// it covers at least the rows of its chunk. Bytes are counted here.
    ///
    /// # Errors
    /// If a neighbour is known to be lost.
    fn start(&mut self, exchange: &Exchange, outgoing: Vec<B>) -> Result<Self::Ticket>;

    /// Waits until the exchange is complete (a device's transport: makes the stream wait) and
    /// returns where each receive landed, in order.
    ///
    /// # Errors
    /// If a neighbour is lost.
    fn finish(&mut self, ticket: Self::Ticket) -> Result<Vec<B>>;

    /// Bytes sent by this rank so far.
    fn bytes_sent(&self) -> u64;
}
