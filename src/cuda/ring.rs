//! A ring's operations: the engine's walk of one rank, or of all of them on one device.

use std::sync::Arc;

use burst_attention_kernels::instances::Target;

use super::driver::Copy;
use super::kernel::TapeKernel;
use super::last::Last;
use super::rank::{Arrays, Memory};
use super::recording::Recording;
use super::tape::{Op, Queue, Work};
use super::tiles::can_fuse;
use super::transport::{Pieces, TapeTransport, to_messages};
use super::workspace::Workspace;
use crate::engine::walk;
use crate::error::{Error, Result};
use crate::problem::{Order, Pass, Problem, Travels};
use crate::schedule::{self, Family, Schedule};
use crate::transport::Transport;

/// What all ranks of a ring share.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What is computed.
    pub problem: Problem,
    /// How chunks travel; fits the number of ranks.
    pub family: Family,
    /// Which pass.
    pub pass: Pass,
    /// What travels; `None` for keys in the forward pass, in the backward one for what costs fewer
    /// bytes.
    pub travels: Option<Travels>,
    /// The order of sums in the backward pass.
    pub backward_order: Order,
}

/// Memory that XLA gives for one rank's call, or in a virtual ring for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
    /// Address of the workspace.
    pub workspace: u64,
    /// Its length.
    pub bytes: u64,
}

/// Operations in order, and the bytes that they send.
#[derive(Debug, Clone, PartialEq)]
pub struct Tape {
    /// From the program before to the program after.
    pub ops: Vec<Op>,
    /// By the formula of [`Problem::row_bytes`].
    pub bytes_sent: u64,
}

impl Call {
    fn schedules(&self) -> Arc<Vec<Schedule>> {
        // The softmax states that queries bring home are float32, and need a kernel to join them.
        let keys = (self.pass == Pass::Forward).then_some(Travels::Keys);
        schedule::kept(&self.problem, self.family, self.pass, self.travels.or(keys))
            .expect("the family fits the number of ranks")
    }

    /// Bytes of workspace that every rank needs.
    pub fn workspace_bytes(&self) -> u64 {
        let may_fuse = self.pass == Pass::Backward && self.backward_order == Order::Any;
        Workspace::bytes(&self.problem, &self.schedules(), may_fuse)
    }

    /// The operations of one rank that exchanges messages with the others.
    ///
    /// # Errors
    /// If the problem can't be computed on CUDA, or the workspace is too small.
    pub fn tape(&self, rank: usize, target: Target, arrays: Arrays, given: Given) -> Result<Tape> {
        let schedules = self.schedules();
        let (pieces, staging) = self.walk(&schedules[rank], target, arrays, given)?;
        let ops = framed(to_messages(pieces.ops, |queue| staging[queue as usize])?);
        Ok(Tape { ops, bytes_sent: pieces.bytes_sent })
    }

    /// The operations of all ranks on one device, chunks copied instead of sent. `given` is cut
    /// into equal workspaces.
    ///
    /// # Errors
    /// As [`Call::tape`].
    pub fn virtual_tape(&self, target: Target, ranks: &[Arrays], given: Given) -> Result<Tape> {
        let schedules = self.schedules();
        let each = self.workspace_bytes();
        let mut bytes_sent = 0;
        let mut tapes = Vec::new();
        for (rank, arrays) in ranks.iter().enumerate() {
            let offset = each * rank as u64;
            let bytes = given.bytes.saturating_sub(offset).min(each);
            let given = Given { workspace: given.workspace + offset, bytes };
            let (tape, _) = self.walk(&schedules[rank], target, *arrays, given)?;
            bytes_sent += tape.bytes_sent;
            tapes.push(tape.ops);
        }
        Ok(Tape { ops: framed(interleaved(tapes)?), bytes_sent })
    }

    /// One rank's walk, and where each queue's staging memory is.
    fn walk(
        &self,
        schedule: &Schedule,
        target: Target,
        arrays: Arrays,
        given: Given,
    ) -> Result<(Tape, [Option<u64>; Queue::ALL.len()])> {
        let problem = &self.problem;
        let fused = self.backward_order == Order::Any && can_fuse(problem, schedule, target)?;
        let last = Last::of(problem, schedule, fused);
        let workspace = Workspace::of_rank(problem, schedule, &last);
        if given.bytes < workspace.bytes {
            let (name, expected) = ("workspace", workspace.bytes);
            return Err(Error::Workspace { name, expected, got: given.bytes });
        }
        let memory = Memory { problem, arrays, base: given.workspace, workspace: &workspace };
        let tape = Recording::default();
        let mut kernel = TapeKernel::new(schedule, target, memory, &last, &tape, fused)?;
        let mut transport = TapeTransport::new(schedule, memory, &tape);
        walk(schedule, &mut kernel, &mut transport)?;
        let bytes_sent = transport.bytes_sent();
        let staging = Queue::ALL.map(|queue| memory.staging(queue));
        Ok((Tape { ops: tape.into_ops(), bytes_sent }, staging))
    }
}

/// With the program before and the program after.
fn framed(ops: Vec<Op>) -> Vec<Op> {
    let step = ops.last().map_or(0, |op| op.step);
    let program = |step| Op { queue: Queue::Compute, step, work: Work::Program, uses: vec![] };
    std::iter::once(program(0)).chain(ops).chain([program(step)]).collect()
}

/// Step by step all ranks' operations: what comes before a step's exchanges, these as copies, and
/// what comes after them.
fn interleaved(tapes: Vec<Vec<Op>>) -> Result<Vec<Op>> {
    let steps = tapes.iter().flatten().map(|op| op.step + 1).max().unwrap_or(0);
    let mut ranks: Vec<_> = tapes.into_iter().map(|ops| ops.into_iter().peekable()).collect();
    let mut all = Vec::new();
    for step in 0..steps {
        let (mut exchanges, mut rest) = (Vec::new(), Vec::new());
        for (rank, ops) in ranks.iter_mut().enumerate() {
            let mut of_step = Vec::new();
            while let Some(mut op) = ops.next_if(|op| op.step == step) {
                op.uses.iter_mut().for_each(|used| used.rank = rank);
                of_step.push(op);
            }
            let is_exchange = |op: &Op| matches!(op.work, Work::Pieces(_));
            let before = of_step.iter().rposition(is_exchange).map_or(0, |last| last + 1);
            rest.extend(of_step.split_off(before));
            for op in of_step {
                if is_exchange(&op) { exchanges.push((rank, op)) } else { all.push(op) }
            }
        }
        all.extend(copies(step, exchanges)?);
        all.extend(rest);
    }
    Ok(all)
}

/// The copies that do what the exchanges of one step do: each piece that is sent goes to the next
/// one that its receiver expects from its sender.
fn copies(step: usize, exchanges: Vec<(usize, Op)>) -> Result<Vec<Op>> {
    // Receiver, sender, where it lands, and which exchange expects it.
    let mut expected = Vec::new();
    for (index, (receiver, op)) in exchanges.iter().enumerate() {
        let Work::Pieces(Pieces { receives, .. }) = &op.work else { continue };
        expected.extend(receives.iter().map(|(sender, to)| (*receiver, *sender, *to, index)));
    }
    let mut made = Vec::new();
    for (sender, op) in &exchanges {
        let Work::Pieces(Pieces { sends, .. }) = &op.work else { continue };
        for (receiver, from) in sends {
            let met = expected.iter().position(|(to, of, ..)| (to, of) == (receiver, sender));
            let Some((_, _, to, index)) = met.map(|at| expected.remove(at)) else {
                let what = format!("what rank {sender} sends to rank {receiver} is not expected");
                return Err(Error::BrokenSchedule { rank: *receiver, step, what });
            };
            let to = from.packed_at(to.address);
            let reads = op.uses.iter().filter(|used| !used.writes);
            let writes = exchanges[index].1.uses.iter().filter(|used| used.writes);
            let uses = reads.chain(writes).copied().collect();
            let work = Work::Copy(Copy { from: *from, to });
            made.push(Op { queue: Queue::Exchange, step, work, uses });
        }
    }
    match expected.first() {
        None => Ok(made),
        Some((rank, ..)) => {
            let what = "what it expects is not sent".into();
            Err(Error::BrokenSchedule { rank: *rank, step, what })
        }
    }
}
