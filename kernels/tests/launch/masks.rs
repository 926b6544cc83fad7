//! The launches that pack masks as data for a cut.

use burst_attention_kernels::instances::{Kernel, Target};
use burst_attention_kernels::launch::{
    Features, Forward, KeyGrads, Launch, QueryGrads, Rectangle, Rows, Statistics, Visible,
};

use crate::footprint::only;
use crate::samples::{O, Q, forward, key_grads, query_grads, segments, shape};
use crate::trial::{integer, pointer};

const WORKSPACE: u64 = 1 << 40;
const INTERVALS: Rows = Rows { address: 0x9000, batch_stride: 2 * 2048 };
const POSITIONS: Rows = Rows { address: 0xa000, batch_stride: 1024 };
const PLACES: Rows = Rows { address: 0xb000, batch_stride: 2048 };

fn visible() -> Visible {
    Visible {
        intervals: Some(INTERVALS),
        also: None,
        positions: Some(POSITIONS),
        counted_positions: Some([POSITIONS, PLACES]),
        workspace: WORKSPACE,
    }
}

fn with_masks() -> Features {
    Features { segments: Some(segments()), visible: Some(visible()), ..Features::default() }
}

/// Returns the kernels of launches.
fn kernels(launches: &[Launch]) -> Vec<Kernel> {
    launches.iter().map(|launch| launch.instance().kernel).collect()
}

#[test]
fn launches_read_what_was_packed_for_them() {
    let (features, rectangle) = (with_masks(), shape(100, 200));
    let queries = ("q_segments", WORKSPACE, WORKSPACE + 2 * 100 * 24);
    let start = queries.2.next_multiple_of(256);
    let keys = ("kv_segments", start, start + 2 * 200 * 24);
    let start = keys.2.next_multiple_of(256);
    let check = |launches: Vec<Launch>, own: (_, u64, u64), other: (_, u64, u64), blocks: u64| {
        let main = launches[3].instance().kernel;
        assert_eq!(kernels(&launches)[..3], [Kernel::MaskRows, Kernel::MaskRows, Kernel::MaskRuns]);
        assert_eq!(launches.len(), 4);
        let runs = ("ranges", start, start + 2 * blocks * 40);
        assert!(runs.2 <= WORKSPACE + Visible::workspace_bytes(2, 100, 200), "{main:?}");
        let of_queries = [
            ("segments", 0x6000, 0x6000 + 4 * (1024 + 100), true, false),
            ("positions", 0xa000, 0xa000 + 4 * (1024 + 100), true, false),
            ("places", 0xa000, 0xa000 + 4 * (1024 + 100), true, false),
            ("packed", queries.1, queries.2, false, true),
        ];
        assert_eq!(only(&launches[..1]), of_queries);
        let of_keys = [
            ("segments", 0x7000, 0x7000 + 4 * (2048 + 200), true, false),
            ("visible", 0x9000, 0x9000 + 4 * (4096 + 400), true, false),
            ("places", 0xb000, 0xb000 + 4 * (2048 + 200), true, false),
            ("packed", keys.1, keys.2, false, true),
        ];
        assert_eq!(only(&launches[1..2]), of_keys);
        let found = [
            ("own_rows", own.1, own.2, true, false),
            ("other_rows", other.1, other.2, true, false),
            ("runs", runs.1, runs.2, false, true),
        ];
        assert_eq!(only(&launches[2..3]), found);
        assert_eq!(integer(&launches[2], "keys_stay"), i64::from(main == Kernel::KeyGrads));
        let read = only(&launches[3..]);
        for (name, start, end) in [own, other, runs] {
            assert!(read.contains(&(name, start, end, true, false)), "{name} in {read:?}");
        }
    };
    let launches = Forward { features, ..forward(rectangle) }.launches(Target::Sm90).unwrap();
    check(launches, queries, keys, 1);
    let launches = QueryGrads { features, ..query_grads(rectangle) }.launches(Target::Sm90);
    check(launches.unwrap(), queries, keys, 1);
    let launches = KeyGrads { features, ..key_grads(rectangle) }.launches(Target::Sm90).unwrap();
    check(launches, keys, queries, 2);
}

#[test]
fn cuts_pack_their_own_rows_in_one_workspace() {
    let at = Statistics { address: 0x5000, batch_stride: 32 * 1024, head_stride: 1024 };
    let state =
        Forward { acc: Some(Q), row_max: Some(at), row_sum: Some(at), ..forward(shape(1000, 900)) };
    // The limit holds 256 rows of the state in float32.
    let limit = 256 * 32 * 128 * 4 + 1;
    let features = with_masks();
    let launches = Forward { features, ..state }.launches_within(Target::Sm90, limit).unwrap();
    assert!(launches.len() >= 32, "{} launches", launches.len());
    let end = WORKSPACE + Visible::workspace_bytes(2, 1000, 900);
    let (mut queries, mut keys) = (vec![], vec![]);
    for cut in launches.chunks(4) {
        assert_eq!(kernels(cut)[3], Kernel::Forward);
        assert_eq!(pointer(&cut[0], "packed"), pointer(&cut[3], "q_segments"));
        assert_eq!(pointer(&cut[1], "packed"), pointer(&cut[3], "kv_segments"));
        assert_eq!(pointer(&cut[2], "runs"), pointer(&cut[3], "ranges"));
        queries.push((pointer(&cut[0], "positions") - POSITIONS.address) / 4);
        keys.push((pointer(&cut[1], "visible") - INTERVALS.address) / 8);
        for launch in cut {
            for (name, first, past, ..) in only(std::slice::from_ref(launch)) {
                assert!(first < WORKSPACE || past <= end, "{name}");
            }
        }
    }
    queries.dedup();
    assert_eq!(queries, [0, 256, 512, 768, 1024, 1280, 1536, 1792]);
    keys.dedup();
    assert_eq!(keys, [0, 2048]);
}

#[test]
fn what_streams_nothing_packs_nothing() {
    let features = with_masks();
    for rectangle in [shape(100, 0), Rectangle { lower: 300, ..shape(100, 90) }] {
        let launches = Forward { features, ..forward(rectangle) }.launches(Target::Sm90).unwrap();
        let names: Vec<_> = only(&launches).iter().map(|it| it.0).collect();
        assert_eq!(names, ["q", "o", "lse"], "{rectangle:?}");
    }
}

#[test]
fn images_with_masks_serve_masks_alone() {
    let image = |features| {
        let launches = Forward { features, ..forward(shape(10, 10)) }.launches(Target::Sm90);
        launches.unwrap().last().unwrap().instance().to_string()
    };
    let visible = Some(visible());
    let bare = Features { visible, ..Features::default() };
    // Float16 has the set with all features only.
    assert_eq!(image(bare), "attention_fwd_general_visible_f16_d128_sm_90");
    assert!(!image(Features { visible: None, ..with_masks() }).contains("visible"));
    let fused = KeyGrads { features: bare, dq_acc: Some(O), ..key_grads(shape(10, 10)) };
    let refused = fused.launches(Target::Sm90).unwrap_err().to_string();
    assert!(refused.contains("no fused kernel"), "{refused}");
}

#[test]
fn intervals_without_positions_are_refused() {
    let refused = |visible: Visible, said: &str| {
        let features = Features { visible: Some(visible), ..Features::default() };
        let error = Forward { features, ..forward(shape(10, 10)) }.launches(Target::Sm90);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    };
    let lacking = Visible { positions: None, ..visible() };
    refused(lacking, "positions must be given with intervals, got none");
    let lacking = Visible { intervals: None, also: Some(INTERVALS), ..visible() };
    refused(lacking, "intervals must be given with second intervals, got none");
    refused(Visible { workspace: 0, ..visible() }, "got null");
}
