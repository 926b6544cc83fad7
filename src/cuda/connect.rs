//! The first contact of a rank with its peers: the ranks agree that all of them are ready, then they
//! make connections.

use std::collections::BTreeSet;

use super::commands::{CommandList, Work};
use super::driver::{Driver, Stream};
use super::error::CudaError;
use super::nccl::{Comm, Communicator, Group, Message};
use super::objects::Device;
use super::region::Queue;
use crate::error::Result;

/// Bytes of the memory for the first messages over all queues, and of that for the ranks' answers. A
/// ring has at most 4,096 ranks.
const PART: u64 = 1 << 16;
/// Bytes of the memory that a device needs for contact with its peers.
const SCRATCH: usize = 2 * PART as usize;
/// The answer of a rank that is ready. No other byte says so.
const READY: u8 = 1;

/// Returns the address of the device's memory for contact with its peers. Allocates it if the
/// device lacks it.
pub(super) fn scratch(driver: &dyn Driver, device: &mut Device) -> Result<u64> {
    match device.scratch {
        Some(address) => Ok(address),
        None => Ok(*device.scratch.insert(driver.allocate(SCRATCH)?)),
    }
}

/// Tells all ranks of a ring whether this rank is ready, and learns which ranks are not. The
/// answer of each rank goes once around the ring, from rank to rank. This thread waits for all
/// other ranks. A rank that could not allocate the memory for its answer tries again here.
///
/// # Errors
/// [`CudaError::NotReady`] if this rank is ready and others are not, or the error of a call.
pub(super) fn agree(
    driver: &dyn Driver,
    device: &mut Device,
    stream: Stream,
    comm: &Communicator<'_>,
    is_ready: bool,
) -> Result<()> {
    let scratch = scratch(driver, device)?;
    // XLA's own stream serves a rank that could not create a stream.
    let stream = device.streams.get(&Queue::Exchange).copied().unwrap_or(stream);
    let Communicator { rank, size, .. } = *comm;
    let answer = |distance: usize| scratch + PART + distance as u64;
    let message =
        |distance, peer| vec![Message { address: answer(distance), bytes: 1, peer: peer % size }];
    // SAFETY: the scratch memory has a byte for each rank. Nothing uses these bytes between two
    // calls of this function, since each call waits for its messages. A call that fails before
    // leaves a broken communicator, over which no answer counts.
    unsafe { driver.write(answer(0), if is_ready { READY } else { !READY }) };
    for distance in 0..size - 1 {
        // The answer of the rank at this distance goes on to the next rank.
        let sends = message(distance, rank + 1);
        let receives = message(distance + 1, rank + size - 1);
        // SAFETY: `allocate` returned memory that the device reaches, and the executor never
        // frees it.
        unsafe { comm.exchange(stream, None, &Group { sends, receives }) }?;
    }
    driver.synchronize(stream)?;
    // SAFETY: the bytes lie in the scratch memory, and all messages have arrived.
    let answers = unsafe { driver.read(answer(1), size - 1) };
    let others = (1..size).filter(|distance| answers[distance - 1] != READY);
    let mut others: Vec<_> = others.map(|distance| (rank + size - distance) % size).collect();
    others.sort_unstable();
    if is_ready && !others.is_empty() {
        return Err(CudaError::NotReady { rank, world_size: size, others }.into());
    }
    Ok(())
}

/// Sends a byte to each new peer to which the commands of a queue send, and receives a byte
/// from each new peer from which they receive.
pub(super) fn connect(
    driver: &dyn Driver,
    device: &mut Device,
    queue: Queue,
    comm: &Communicator<'_>,
    list: &CommandList,
) -> Result<()> {
    let (mut to, mut from) = (BTreeSet::new(), BTreeSet::new());
    for command in list.commands.iter().filter(|command| command.queue == queue) {
        if let Work::Exchange(group) = &command.work {
            to.extend(group.sends.iter().map(|message| (comm.comm, message.peer)));
            from.extend(group.receives.iter().map(|message| (comm.comm, message.peer)));
        }
    }
    // The two directions are kept apart, so that both ends of each agree on whether it is new.
    to.retain(|connection| !device.sent_to.contains(connection));
    from.retain(|connection| !device.received_from.contains(connection));
    if to.is_empty() && from.is_empty() {
        return Ok(());
    }
    let scratch = scratch(driver, device)?;
    // Each queue has its own part of the scratch memory, and sends from half of it.
    let part = PART / Queue::ALL.len() as u64;
    let (scratch, half) = (scratch + queue as u64 * part, part / 2);
    let message = |base: u64, &(_, peer): &(Comm, usize)| Message {
        address: scratch + base + peer as u64 % half,
        bytes: 1,
        peer,
    };
    let group = Group {
        sends: to.iter().map(|connection| message(0, connection)).collect(),
        receives: from.iter().map(|connection| message(half, connection)).collect(),
    };
    let stream = device.streams[&queue];
    // SAFETY: `allocate` returned memory that the device reaches and that holds both halves, and
    // the executor never frees it.
    unsafe { comm.exchange(stream, None, &group) }?;
    device.sent_to.extend(to);
    device.received_from.extend(from);
    Ok(())
}
