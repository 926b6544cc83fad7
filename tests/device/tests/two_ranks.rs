//! Two ranks without the executor: each rank adds the values of its peer to its own and rounds the
//! sum.

use burst_attention::cuda::driver::{Block, Copy, Driver, Stream};
use burst_attention::cuda::nccl::{Comm, Communicator, Group, Message};
use burst_attention_device_tests::World;
use burst_attention_interpreter::Address;
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Cast, Rows};
use burst_attention_recorder::{Program, Recorder, check, image, mutations, nccl};
use half::bf16;

const ROWS: usize = 70;
const DIM: usize = 8;
const COUNT: usize = ROWS * DIM;
const BYTES: u64 = COUNT as u64 * 4;

/// A rank's arrays: its own values, their copy to send, the values that arrive, and the result.
struct Rank {
    own: Address,
    sent: Address,
    came: Address,
    out: Address,
}

fn value(rank: usize, index: usize) -> f32 {
    (index as f32 + 0.25) * if rank == 0 { 1.0 } else { -0.75 }
}

fn place(world: &mut World) -> Vec<Rank> {
    let rank = |rank| {
        let mut array = |name: &str, bytes| world.allocate(rank, &format!("{name} {rank}"), bytes);
        let (own, sent) = (array("own", BYTES), array("sent", BYTES));
        let (came, out) = (array("came", BYTES), array("out", BYTES / 2));
        let values: Vec<_> = (0..COUNT).map(|index| value(rank, index)).collect();
        world.memory.write_f32(own, &values);
        Rank { own, sent, came, out }
    };
    (0..2).map(rank).collect()
}

/// Enqueues the program of one rank with the calls that the executor also makes.
fn enqueue(recorder: &Recorder, rank: &Rank, device: Stream, comm: Comm) {
    recorder.push_context(recorder.stream_context(device).unwrap()).unwrap();
    let own = recorder.create_stream().unwrap();
    let events = [(); 2].map(|()| recorder.create_event().unwrap());
    let run = |at: Address| Block::run(at.0, BYTES);
    recorder.copy(device, &Copy { from: run(rank.own), to: run(rank.sent) }).unwrap();
    recorder.record(device, events[0]).unwrap();
    recorder.wait(own, events[0]).unwrap();
    let communicator = Communicator::new(nccl(), comm, 2).unwrap();
    let peer = 1 - communicator.rank;
    let message = |at: Address| vec![Message { address: at.0, bytes: BYTES, peer }];
    let group = Group { sends: message(rank.sent), receives: message(rank.came) };
    // SAFETY: the recorder reads and writes no memory of messages.
    unsafe { communicator.exchange(own, None, &group) }.unwrap();
    recorder.record(own, events[1]).unwrap();
    recorder.wait(device, events[1]).unwrap();
    let rows = |at: Address| Rows { address: at.0, batch_stride: 0 };
    let finish = Cast {
        batch: 1,
        rows: ROWS,
        heads: 1,
        head_dim: DIM,
        element: Element::Bf16,
        a: rows(rank.own),
        b: Some(rows(rank.came)),
        out: rows(rank.out),
        scale: 1.0,
    };
    for launch in finish.launches(Target::Sm90).unwrap() {
        let instance = &launch.instance;
        let function = recorder.load(&image(instance), &instance.entry()).unwrap();
        recorder.launch(device, function, &launch).unwrap();
    }
    recorder.pop_context().unwrap();
}

/// Runs the programs of both ranks after `change`, and checks the results.
fn run(seed: u64, change: impl Fn(&mut Vec<Program>)) -> Result<(), String> {
    let (recorder, mut world) = (Recorder::new(), World::new());
    let ranks = place(&mut world);
    for (number, rank) in ranks.iter().enumerate() {
        let device = recorder.add_device();
        enqueue(&recorder, rank, device, recorder.add_comm(number, 2, device));
    }
    assert_eq!(recorder.violations(), [""; 0]);
    let mut programs = recorder.take();
    change(&mut programs);
    world.carry_out(&programs, seed).map_err(|stuck| stuck.to_string())?;
    for (number, rank) in ranks.iter().enumerate() {
        let sum = |index| bf16::from_f32(value(number, index) + value(1 - number, index));
        let expected: Vec<_> = (0..COUNT).map(sum).collect();
        if world.memory.read_bf16(rank.out, COUNT) != expected {
            return Err(format!("rank {number} has a wrong result"));
        }
    }
    Ok(())
}

#[test]
fn every_order_gives_the_right_result() {
    for seed in 0..20 {
        run(seed, |programs| {
            for program in programs {
                check(program).unwrap_or_else(|race| panic!("{race}"));
            }
        })
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn without_any_of_its_events_some_order_goes_wrong() {
    for index in 0..4 {
        let mutate = |programs: &mut Vec<Program>| {
            let mutation = mutations(&programs[0]).swap_remove(index);
            check(&mutation.program).expect_err(&mutation.removed);
            programs[0] = mutation.program;
        };
        let errors: Vec<_> = (0..20).filter_map(|seed| run(seed, mutate).err()).collect();
        assert!(!errors.is_empty(), "event call {index} is not needed");
        assert!(errors.iter().all(|error| error.contains("never written")), "{errors:?}");
    }
}

#[test]
fn memory_of_another_device_is_out_of_reach() {
    let swap = |programs: &mut Vec<Program>| programs.swap(0, 1);
    let error = run(0, swap).unwrap_err();
    assert!(error.contains("lies on device"), "{error}");
}
