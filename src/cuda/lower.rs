//! Lowering: from a call to the command list of one rank, or of all ranks on one device.

use burst_attention_kernels::backend::{Backends, Choices};

use super::call::Call;
use super::commands::{Command, CommandList, CommandListBuilder, PeerBlocks, Work};
use super::driver::{Block, Copy};
use super::error::CudaError;
use super::final_writes::FinalWrites;
use super::gradients::GradientOperations;
use super::nccl::{Group, Message};
use super::rank::RankMemory;
use super::region::{Queue, Region, reads, writes};
use super::tiles::{CommandKernel, element_of};
use super::transport::CommandTransport;
use super::workspace::{Workspace, WorkspaceLayout};
use crate::engine::walk;
use crate::error::{Error, Result};
use crate::operands::Arrays;
use crate::schedule::Schedule;
use crate::transport::Transport;

/// Returns the commands of one rank, which exchanges messages with its peers.
///
/// # Errors
/// If CUDA can't compute the problem, or the workspace is too small.
pub(super) fn one_rank(
    call: &Call,
    rank: usize,
    backends: Backends,
    arrays: Arrays<u64>,
    workspace: Workspace,
) -> Result<CommandList> {
    let schedule = &call.schedules()[rank];
    let (list, layout) = walk_rank(call, schedule, backends, arrays, workspace)?;
    let staging = |queue| layout.at(Region::Staging(queue), workspace.address);
    let commands = framed(to_messages(list.commands, staging)?);
    Ok(CommandList { commands, ..list })
}

/// Returns the commands of all ranks on one device, with copies instead of messages. The ranks get
/// equal parts of the workspace.
///
/// # Errors
/// As [`one_rank`].
pub(super) fn all_ranks(
    call: &Call,
    backends: Backends,
    ranks: &[Arrays<u64>],
    workspace: Workspace,
) -> Result<CommandList> {
    let each = call.workspace_bytes();
    let (mut bytes_sent, mut choices, mut lists) = (0, Choices::default(), Vec::new());
    for (rank, (arrays, schedule)) in ranks.iter().zip(&*call.schedules()).enumerate() {
        let offset = each * rank as u64;
        let bytes = workspace.bytes.saturating_sub(offset).min(each);
        let part = Workspace { address: workspace.address + offset, bytes };
        let (list, _) = walk_rank(call, schedule, backends, *arrays, part)?;
        bytes_sent += list.bytes_sent;
        choices.extend(list.choices);
        lists.push(list.commands);
    }
    Ok(CommandList { commands: framed(interleaved(lists)?), bytes_sent, choices })
}

/// Walks the schedule of one rank. Returns its commands and the layout of its workspace.
fn walk_rank(
    call: &Call,
    schedule: &Schedule,
    backends: Backends,
    arrays: Arrays<u64>,
    workspace: Workspace,
) -> Result<(CommandList, WorkspaceLayout)> {
    let Call { problem, backward_order, lse_gradient, .. } = call;
    let (operations, choice) =
        GradientOperations::of(problem, schedule, backends, *backward_order, *lse_gradient)?;
    let final_writes = FinalWrites::of(problem, schedule, operations.are_fused());
    let layout = WorkspaceLayout::of_rank(call, schedule, &final_writes);
    if workspace.bytes < layout.bytes {
        let (name, expected) = ("workspace", layout.bytes);
        return Err(CudaError::Workspace { name, expected, got: workspace.bytes }.into());
    }
    let memory = RankMemory { problem, arrays, base: workspace.address, workspace: &layout };
    let scratch = layout.at(Region::Scratch, workspace.address).unwrap_or_default();
    let list = CommandListBuilder::default();
    choice.into_iter().for_each(|choice| list.note(choice));
    let mut kernel = CommandKernel {
        schedule,
        backends: Backends { scratch, ..backends },
        lse_gradient: call.lse_gradient,
        element: element_of(problem.dtype)?,
        memory,
        final_writes: &final_writes,
        list: &list,
        turns: [0; 2],
        operations,
    };
    let mut transport = CommandTransport { schedule, memory, list: &list, bytes: 0 };
    walk(schedule, &mut kernel, &mut transport)?;
    let bytes_sent = transport.bytes_sent();
    Ok((list.finish(bytes_sent), layout))
}

/// Adds the program before and the program after.
fn framed(commands: Vec<Command>) -> Vec<Command> {
    let step = commands.last().map_or(0, |command| command.step);
    let program = |step| Command { queue: Queue::Compute, step, work: Work::Program, uses: vec![] };
    std::iter::once(program(0)).chain(commands).chain([program(step)]).collect()
}

/// Turns blocks into messages. A block with gaps is first packed in the staging memory of its
/// queue. The next exchange of the queue may use that memory again, since the queue runs in order.
///
/// # Errors
/// If there is no staging memory.
fn to_messages(
    commands: Vec<Command>,
    staging: impl Fn(Queue) -> Option<u64>,
) -> Result<Vec<Command>> {
    let mut lowered = Vec::with_capacity(commands.len());
    for command in commands {
        let Command { queue, step, work: Work::Blocks(blocks), mut uses } = command else {
            lowered.push(command);
            continue;
        };
        let mut next = staging(queue);
        let mut group = Group::default();
        for (peer, block) in blocks.sends {
            let bytes = block.bytes();
            let mut address = block.address;
            if !block.is_contiguous() {
                let name = "staging memory";
                address = next.ok_or(CudaError::Workspace { name, expected: bytes, got: 0 })?;
                next = Some(address + bytes);
                let packing = uses.iter().filter(|used| !used.writes).copied();
                let uses = packing.chain([writes(Region::Staging(queue))]).collect();
                let work = Work::Copy(Copy { from: block, to: block.packed_at(address) });
                lowered.push(Command { queue, step, work, uses });
            }
            group.sends.push(Message { address, bytes, peer });
        }
        let message = |(peer, block): (usize, Block)| Message {
            address: block.address,
            bytes: block.bytes(),
            peer,
        };
        group.receives = blocks.receives.into_iter().map(message).collect();
        uses.push(reads(Region::Staging(queue)));
        lowered.push(Command { queue, step, work: Work::Exchange(group), uses });
    }
    Ok(lowered)
}

/// Orders the commands of all ranks step by step: first the commands up to the step's exchanges,
/// then the exchanges as copies, then the other commands.
fn interleaved(lists: Vec<Vec<Command>>) -> Result<Vec<Command>> {
    let steps = lists.iter().flatten().map(|command| command.step + 1).max().unwrap_or(0);
    let mut ranks: Vec<_> = lists.into_iter().map(|list| list.into_iter().peekable()).collect();
    let mut all = Vec::new();
    for step in 0..steps {
        let (mut exchanges, mut rest) = (Vec::new(), Vec::new());
        for (rank, commands) in ranks.iter_mut().enumerate() {
            let mut of_step = Vec::new();
            while let Some(mut command) = commands.next_if(|command| command.step == step) {
                command.uses.iter_mut().for_each(|used| used.rank = rank);
                of_step.push(command);
            }
            let is_exchange = |command: &Command| matches!(command.work, Work::Blocks(_));
            let before = of_step.iter().rposition(is_exchange).map_or(0, |last| last + 1);
            rest.extend(of_step.split_off(before));
            let (blocks, launches) = of_step.into_iter().partition::<Vec<_>, _>(is_exchange);
            exchanges.extend(blocks.into_iter().map(|command| (rank, command)));
            all.extend(launches);
        }
        all.extend(copies(step, exchanges)?);
        all.extend(rest);
    }
    Ok(all)
}

/// Returns the copies that replace the exchanges of one step. Each block that a rank sends goes to
/// the next block that its receiver expects from it.
fn copies(step: usize, exchanges: Vec<(usize, Command)>) -> Result<Vec<Command>> {
    // The receiver, the sender, the block of the receiver, and the exchange that expects it.
    let mut expected = Vec::new();
    for (index, (receiver, command)) in exchanges.iter().enumerate() {
        let Work::Blocks(PeerBlocks { receives, .. }) = &command.work else { continue };
        expected.extend(receives.iter().map(|(sender, to)| (*receiver, *sender, *to, index)));
    }
    let mut made = Vec::new();
    for (sender, command) in &exchanges {
        let Work::Blocks(PeerBlocks { sends, .. }) = &command.work else { continue };
        for (receiver, from) in sends {
            let met = expected.iter().position(|(to, of, ..)| (to, of) == (receiver, sender));
            let Some((_, _, to, index)) = met.map(|at| expected.remove(at)) else {
                let what = format!("what rank {sender} sends to rank {receiver} is not expected");
                return Err(Error::BrokenSchedule { rank: *receiver, step, what });
            };
            let to = from.packed_at(to.address);
            let reads = command.uses.iter().filter(|used| !used.writes);
            let writes = exchanges[index].1.uses.iter().filter(|used| used.writes);
            let uses = reads.chain(writes).copied().collect();
            let work = Work::Copy(Copy { from: *from, to });
            made.push(Command { queue: Queue::Exchange, step, work, uses });
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
