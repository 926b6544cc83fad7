//! Descriptions that have no launches, and their error messages.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    Cast, Dropout, EvenPositions, Features, Forward, LaunchError, Rectangle, Rows, Segments,
    Statistics,
};
use burst_attention_kernels::record::Value;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NameError, MapDeserializer};

use crate::samples::{delta, forward, key_grads, query_grads, segments, shape};

#[track_caller]
fn assert_refused(description: &Forward, limit: u64, said: &[&str]) {
    let error = description.launches_within(Target::Sm90, limit).unwrap_err();
    let message = error.to_string();
    for part in said {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[track_caller]
fn assert_shape_refused(change: impl Fn(&mut Rectangle), said: &[&str]) {
    let mut description = forward(shape(100, 100));
    change(&mut description.rectangle);
    assert_refused(&description, u64::MAX, said);
}

#[track_caller]
fn assert_arrays_refused(change: impl Fn(&mut Forward), said: &[&str]) {
    let mut description = forward(shape(100, 100));
    change(&mut description);
    assert_refused(&description, u64::MAX, said);
}

#[test]
fn a_head_dimension_without_a_kernel() {
    for head_dim in [0, 4, 12, 264] {
        let got = format!("got {head_dim}");
        let said = ["head_dim must be a multiple of 8 from 8 to 256", got.as_str()];
        assert_shape_refused(|shape| shape.head_dim = head_dim, &said);
        let said = ["value_dim must be a multiple of 8 from 8 to 256", got.as_str()];
        assert_shape_refused(|shape| shape.value_dim = head_dim, &said);
    }
}

#[test]
fn other_columns_of_values_are_not_refused() {
    let rectangle = Rectangle { value_dim: 64, ..shape(100, 100) };
    assert!(forward(rectangle).launches(Target::Sm90).is_ok());
    assert!(key_grads(rectangle).launches(Target::Sm90).is_ok());
    assert!(query_grads(rectangle).launches(Target::Sm90).is_ok());
}

#[test]
fn heads_that_do_not_share_evenly() {
    let said = ["kv_heads must be a divisor of heads (32), got 5"];
    assert_shape_refused(|shape| shape.kv_heads = 5, &said);
    let said = ["kv_heads must be a divisor of heads (32), got 0"];
    assert_shape_refused(|shape| shape.kv_heads = 0, &said);
    assert_shape_refused(|shape| shape.heads = 0, &["heads must be at least 1, got 0"]);
}

#[test]
fn a_scale_that_the_kernels_cannot_use() {
    for scale in [0.0, -0.5, f32::NAN, f32::INFINITY, f32::MAX] {
        let got = format!("got {scale}");
        let said = ["softmax_scale must be positive and finite", "negate the queries", &got];
        assert_shape_refused(|shape| shape.softmax_scale = scale, &said);
    }
}

#[test]
fn a_soft_cap_that_is_none() {
    for soft_cap in [-1.0, 1e-40, 1e4, f32::NAN, f32::INFINITY] {
        let features = Features { soft_cap, ..Features::default() };
        let got = format!("got {soft_cap}");
        let said = ["soft_cap must be 0 for none, or from 0.001 to 1000", got.as_str()];
        assert_arrays_refused(|description| description.features = features, &said);
    }
}

#[test]
fn a_rate_that_drops_everything() {
    for rate in [-0.1, 1.0, f32::NAN] {
        let dropout = Some(Dropout { numbers: Rows { address: 0x7000, batch_stride: 4 }, rate });
        let features = Features { dropout, ..Features::default() };
        let said = ["rate of dropout must be at least 0 and below 1", &format!("got {rate}")];
        assert_arrays_refused(|description| description.features = features, &said);
    }
}

#[test]
fn positions_that_the_kernels_cannot_count() {
    let slopes = Some(Rows { address: 0x7000, batch_stride: 32 });
    let at = |query, key, stride| EvenPositions { query, key, stride };
    let refused = |positions, said: &[&str]| {
        let features = Features { slopes, positions, ..Features::default() };
        assert_arrays_refused(|description| description.features = features, said);
    };
    let said = ["position of the first query must be such that it and 128 rows on are from 0 to"];
    refused(at(5, 0, 1 << 24), &said);
    refused(at(-1, 0, 1), &said);
    let said = ["position of the first key must be", "2147483520, 1 apart"];
    refused(at(0, 2_147_483_520, 1), &said);
    let none = Features { slopes: Some(Rows::default()), ..Features::default() };
    let said = ["slopes of attention_fwd must be the address of an array, got null"];
    assert_arrays_refused(|description| description.features = none, &said);
    let positions = at(0, 2_147_483_519, 1);
    let features = Features { slopes, positions, ..Features::default() };
    let description = Forward { features, ..forward(shape(100, 100)) };
    assert!(description.launches(Target::Sm90).is_ok());
}

#[test]
fn counts_beyond_32_bits() {
    let said = ["q_len must be at most 2147483647, got 2147483648"];
    assert_shape_refused(|shape| shape.q_len = 1 << 31, &said);
    assert_shape_refused(|shape| shape.batch = 1 << 40, &["batch must be at most 2147483647"]);
}

#[test]
fn more_blocks_than_a_grid_holds() {
    let batch = i32::MAX as usize;
    let (heads, kv_heads, head_dim, value_dim) = (2, 1, 8, 8);
    let rectangle = Rectangle { batch, heads, kv_heads, head_dim, value_dim, ..shape(1, 1) };
    let same = |rows: Rows| Rows { batch_stride: 0, ..rows };
    let mut description = forward(rectangle);
    description.q = same(description.q);
    (description.k, description.v) = (same(description.k), same(description.v));
    description.o = description.o.map(same);
    description.lse = description.lse.map(same);
    description.acc = Some(description.q);
    let statistics = Statistics { address: 0x5000, batch_stride: 0, head_stride: 4 };
    (description.row_max, description.row_sum) = (Some(statistics), Some(statistics));
    let at = same(description.q);
    description.features = Features {
        segments: Some(Segments { queries: at, keys: at, ranges: at }),
        slopes: Some(at),
        dropout: Some(Dropout { numbers: at, rate: 0.1 }),
        ..Features::default()
    };
    let said = ["number of blocks must be at most 2147483647", "got 4294967294"];
    assert_refused(&description, u64::MAX, &said);
}

#[test]
fn a_misaligned_address() {
    let said = ["q must be a multiple of 16 bytes, got 0x1008", "align the array"];
    assert_arrays_refused(|description| description.q.address += 8, &said);
    let shift = |at: Option<Rows>| at.map(|at| Rows { address: at.address + 2, ..at });
    let said = ["lse must be a multiple of 4 bytes, got 0x4002"];
    assert_arrays_refused(|description| description.lse = shift(description.lse), &said);
}

#[test]
fn a_misaligned_stride() {
    let said = ["q_batch_stride must be a multiple of 8 elements, got 16777220"];
    assert_arrays_refused(|description| description.q.batch_stride += 4, &said);
}

#[test]
fn statistics_whose_entries_are_misaligned_on_their_own() {
    let statistics = Statistics { address: 0x5000, batch_stride: 6402, head_stride: 200 };
    let (acc, row_max) = (Some(forward(shape(1, 1)).q), Some(statistics));
    let base = forward(shape(100, 100));
    let description = Forward { acc, row_max, row_sum: row_max, last: false, ..base };
    assert!(description.launches(Target::Sm90).is_ok(), "in one launch they need no alignment");
    let said = ["row_max must be a multiple of 16 bytes", "launched on their own"];
    assert_refused(&description, 1 << 22, &said);
}

#[test]
fn arrays_of_one_stride_that_lie_differently() {
    let mut description = delta(shape(100, 100));
    description.dout.batch_stride += 8;
    let message = description.launches(Target::Sm90).unwrap_err().to_string();
    let said = "dout must be laid out as o (stride 16777216), got batch stride 16777224";
    assert!(message.contains(said), "{message}");
    let row_max = Statistics { address: 0x5000, batch_stride: 4096, head_stride: 128 };
    let said = ["row_sum must be laid out as row_max (stride 128), got head stride 124"];
    let change = |description: &mut Forward| {
        description.row_max = Some(row_max);
        description.row_sum = Some(Statistics { head_stride: 124, ..row_max });
    };
    assert_arrays_refused(change, &said);
}

#[test]
fn an_array_that_ends_beyond_the_address_space() {
    let said = ["q must be below 2^64 to its end", "0xffffffffffffff00 + "];
    assert_arrays_refused(|description| description.q.address = 0_u64.wrapping_sub(256), &said);
    let said = ["q must be below 2^64 to its end"];
    assert_arrays_refused(|description| description.q.batch_stride = u64::MAX - 7, &said);
}

#[test]
fn a_missing_array() {
    let said = ["q of attention_fwd must be the address of an array, got null: it is read"];
    assert_arrays_refused(|description| description.q.address = 0, &said);
    let said = ["o of attention_fwd", "got null: the last launch of these rows writes it"];
    assert_arrays_refused(|description| description.o = None, &said);
    let said = ["acc of attention_fwd", "got null", "here first is true, last false"];
    assert_arrays_refused(|description| description.last = false, &said);
    let said = ["acc of attention_fwd", "got null", "here first is false, last true"];
    assert_arrays_refused(|description| description.first = false, &said);
}

#[test]
fn a_missing_array_of_segments() {
    let refused = |change: fn(&mut Segments), said: &str| {
        let mut segments = segments();
        change(&mut segments);
        let features = Features { segments: Some(segments), ..Features::default() };
        assert_arrays_refused(|description| description.features = features, &[said, "got null"]);
    };
    refused(|segments| segments.queries.address = 0, "segments of segment_ranges");
    refused(|segments| segments.keys.address = 0, "others of segment_ranges");
    refused(|segments| segments.ranges.address = 0, "ranges of segment_ranges");
}

#[test]
fn a_missing_result_of_rows() {
    let (batch, rows, heads, head_dim, element) = (1, 10, 1, 64, Element::Bf16);
    let (a, out) = (forward(shape(1, 1)).q, Rows::default());
    let (b, scale) = (None, 1.0);
    let description = Cast { batch, rows, heads, head_dim, element, a, b, out, scale };
    let message = description.launches(Target::Sm100).unwrap_err().to_string();
    assert!(message.contains("out of cast must be the address of an array"), "{message}");
    assert!(message.contains("it is written"), "{message}");
}

#[test]
fn a_missing_state_though_first_and_last_because_keys_are_cut() {
    let rectangle = shape(64, 4096);
    let description = forward(rectangle);
    assert_eq!(description.launches(Target::Sm90).unwrap().len(), 1);
    let said = ["acc of attention_fwd", "got null", "too large for one launch, needs it"];
    assert_refused(&description, 4 << 20, &said);
    // Cutting queries alone leaves each cut first and last.
    let queries = forward(shape(4096, 64));
    assert!(queries.launches_within(Target::Sm90, 4 << 20).unwrap().len() > 2);
}

#[test]
fn a_tile_that_does_not_fit() {
    let said = ["q must span less than 4096 bytes over the heads of 100 rows", "got 819200"];
    assert_refused(&forward(shape(100, 100)), 4096, &said);
    // Some rows fit, but not a whole tile.
    let said = ["acc must span less than 1000000 bytes over the heads of 100 rows"];
    assert_refused(&forward(shape(100, 100)), 1_000_000, &said);
    let said = ["q must span less than 1000000 bytes over the heads of 128 rows"];
    assert_refused(&forward(shape(1000, 100)), 1_000_000, &said);
    let wide = Statistics { address: 0x5000, batch_stride: 4, head_stride: 1 << 30 };
    let said = ["row_max must span less than 2147483648 bytes", "smaller head stride"];
    let change = |description: &mut Forward| description.row_max = Some(wide);
    assert_arrays_refused(change, &said);
}

#[test]
fn a_launch_that_was_changed_by_hand() {
    let launches = forward(shape(100, 100)).launches(Target::Sm90).unwrap();
    assert_eq!(launches[0].check(), Ok(()));
    let changed = |n: usize, value| {
        let mut launch = launches[0].clone();
        launch.values[n] = value;
        launch.check().unwrap_err()
    };
    assert!(matches!(changed(3, Value::Pointer(0)), LaunchError::Null { name: "acc", .. }));
    assert!(matches!(
        changed(3, Value::Pointer(8)),
        LaunchError::Misaligned { name: "acc", divisor: 16, .. }
    ));
    assert!(matches!(changed(8, Value::F32(1.0)), LaunchError::Invalid { name: "batch", .. }));
    let mut short = launches[0].clone();
    short.values.pop();
    assert!(short.check().unwrap_err().to_string().contains("number of values must be"));
}

#[test]
fn names_are_read_back_and_unknown_ones_say_what_there_is() {
    for element in Element::ALL {
        let read: Result<Element, NameError> =
            Element::deserialize(element.name().into_deserializer());
        assert_eq!(read, Ok(element));
    }
    let error: NameError = Target::deserialize("sm_70".into_deserializer()).unwrap_err();
    assert!(error.to_string().starts_with("expected a target of sm_80, "), "{error}");
    assert!(error.to_string().ends_with(", got sm_70"), "{error}");
    let fields = [("address", 4096_u64), ("batch_stride", 8)];
    let read: Result<Rows, NameError> = Rows::deserialize(MapDeserializer::new(fields.into_iter()));
    assert_eq!(read, Ok(Rows { address: 4096, batch_stride: 8 }));
}
