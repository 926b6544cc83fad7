//! Tests on small programs that are written by hand.

mod check;
mod nccl;
mod recorder;
mod replay;

use burst_attention::cuda::driver::{Block, Copy, Event, Stream};
use burst_attention::cuda::nccl::{Comm, Group, Message};
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Cast, Launch, Rows};

use super::{Call, Exchange, Operation, Program};

const COMPUTE: Stream = Stream(1);
const OTHER: Stream = Stream(2);

/// A launch that casts `rows` rows of 8 float32 at `from` to bfloat16 at `to`.
fn launch(from: u64, to: u64, rows: usize) -> Launch {
    let at = |address| Rows { address, batch_stride: 0 };
    let (batch, heads, head_dim, element) = (1, 1, 8, Element::Bf16);
    let (a, b, out) = (at(from), None, at(to));
    let finish = Cast { batch, rows, heads, head_dim, element, a, b, out, scale: 1.0 };
    let mut launches = finish.launches(Target::Sm90).unwrap();
    assert_eq!(launches.len(), 1);
    launches.remove(0)
}

fn copy(from: u64, to: u64, bytes: u64) -> Operation {
    Operation::Copy(Copy { from: Block::run(from, bytes), to: Block::run(to, bytes) })
}

/// An exchange of a rank. Each message is (peer, address, bytes).
fn exchange(rank: usize, sends: &[(usize, u64, u64)], receives: &[(usize, u64, u64)]) -> Operation {
    let message = |&(peer, address, bytes): &(usize, u64, u64)| Message { address, bytes, peer };
    let [sends, receives] = [sends, receives].map(|all| all.iter().map(message).collect());
    Operation::Exchange(Exchange { comm: Comm(9), ring: 0, rank, group: Group { sends, receives } })
}

fn record(event: usize) -> Operation {
    Operation::Record(Event(event))
}

fn wait(event: usize) -> Operation {
    Operation::Wait(Event(event))
}

fn program(calls: &[(Stream, Operation)]) -> Program {
    let call = |(stream, operation): &(Stream, Operation)| Call {
        stream: *stream,
        operation: operation.clone(),
    };
    Program { compute: COMPUTE, calls: calls.iter().map(call).collect() }
}
