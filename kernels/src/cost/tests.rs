use super::*;
use crate::element::Element;

fn rectangle(rows: [usize; 2], columns: usize, upper: i64) -> Rectangle {
    let [q_len, kv_len] = rows;
    let (batch, heads, kv_heads) = (1, 32, 8);
    let (head_dim, value_dim, element) = (columns, columns, Element::Bf16);
    let (lower, softmax_scale) = (i64::MIN, 1.0);
    Rectangle {
        batch,
        q_len,
        kv_len,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        lower,
        upper,
        softmax_scale,
    }
}

fn forward(rectangle: Rectangle, first: bool, last: bool) -> TileOperation {
    Forward { first, last, ..Forward::unplaced(rectangle, Features::default()) }.into()
}

/// A hop of a ring: 1,024 blocks of 32 tiles take 8 rounds of 132, and each way of a state adds to
/// every round.
#[test]
fn a_hop_takes_rounds_of_blocks_and_of_states() {
    let hop = rectangle([4096, 2048], 128, i64::MAX);
    let micros = |first, last| {
        1e6 * own(&forward(hop, first, last), Target::Sm90).expect("a cost").seconds - 2.2
    };
    let block = 32.0 * 0.955 + 3.4;
    for (first, last, carries) in [(true, true, 0.0), (true, false, 1.0), (false, false, 2.0)] {
        let expected = 8.0 * (block + carries * 2.9);
        assert!((micros(first, last) - expected).abs() < 1e-6, "{first} {last}");
    }
    assert_eq!(micros(false, true), micros(true, false));
}

#[test]
fn sums_of_cudnn_move_the_bytes_of_their_kernels() {
    let hop = rectangle([4096, 2048], 128, i64::MAX);
    let whole = cudnn(&forward(hop, true, true), Target::Sm90).unwrap();
    let middle = cudnn(&forward(hop, false, false), Target::Sm90).unwrap();
    let fold = 4096.0 * 32.0 * 128.0 * 10.0 / 2.878e12 + 2.2e-6;
    assert!((middle.seconds - whole.seconds - fold).abs() < 1e-12);
    assert_eq!((whole.launches, middle.launches), (1, 2));
    let mut grads = KeyGrads::fused(hop, Features::default());
    grads.first = false;
    let all = cudnn(&grads.into(), Target::Sm90).unwrap();
    assert_eq!((all.launches, all.source), (4, Source::Measured));
    grads.fixed_order = true;
    let fixed = cudnn(&grads.into(), Target::Sm90).unwrap();
    assert!(fixed.seconds > all.seconds && fixed.source == Source::Predicted);
}

/// What an H100 measured decides on it: cuDNN's gradients, two kernels before the fused one at 128
/// columns and the other way round at 64, and both forward at 64.
#[test]
fn costs_order_kernels_as_an_h100_did() {
    let seconds = |cost: Option<Cost>| cost.expect("a cost").seconds;
    for rows in [4096, 8192, 16_384] {
        for (columns, fuses) in [(64, true), (128, false)] {
            let causal = rectangle([rows; 2], columns, 0);
            let grads = KeyGrads::fused(causal, Features::default());
            let fused = seconds(own(&grads.into(), Target::Sm90));
            let two = seconds(apart(&grads, (true, false), Target::Sm90));
            assert_eq!(fused < two, fuses, "{rows} {columns}: {fused} {two}");
            let library = seconds(cudnn(&grads.into(), Target::Sm90));
            assert!(columns == 64 || library < 0.9 * two, "{rows}: {library} {two}");
            let tile = forward(causal, true, false);
            let ratio = seconds(own(&tile, Target::Sm90)) / seconds(cudnn(&tile, Target::Sm90));
            // At 64 columns cuDNN is faster in one launch, by as much as its sums take.
            let expected = if columns == 64 { 0.9..1.02 } else { 1.05..1.25 };
            assert!(expected.contains(&ratio), "{rows} {columns}: {ratio}");
        }
    }
}

#[test]
fn what_nothing_is_known_of_has_no_cost() {
    let tile = forward(rectangle([4096; 2], 128, 0), true, true);
    assert_eq!((own(&tile, Target::Sm80), cudnn(&tile, Target::Sm120)), (None, None));
    let odd = forward(rectangle([4096; 2], 96, 0), true, true);
    assert_eq!(own(&odd, Target::Sm90).map(|cost| cost.source), Some(Source::Predicted));
    assert_eq!(cudnn(&odd, Target::Sm90), None);
    let wide = KeyGrads::fused(rectangle([4096; 2], 256, 0), Features::default());
    assert_eq!(own(&wide.into(), Target::Sm90), None);
    assert_eq!(cudnn(&wide.into(), Target::Sm100), None);
    let published = cudnn(&tile, Target::Sm103).map(|cost| cost.source);
    assert_eq!(published, Some(Source::Published));
}

/// A schedule asks for the cost of each of its tiles.
#[test]
#[ignore = "a timing: run it alone, and optimised"]
fn a_cost_takes_microseconds() {
    for (rows, upper) in [([8192; 2], i64::MAX), ([8192; 2], 0), ([1 << 16; 2], 0)] {
        let tile = forward(rectangle(rows, 128, upper), true, true);
        let start = std::time::Instant::now();
        for _ in 0..100 {
            std::hint::black_box(own(std::hint::black_box(&tile), Target::Sm90));
        }
        let micros = start.elapsed().as_secs_f64() * 1e4;
        println!("{rows:?} {upper}: {micros} µs");
        assert!(micros < 20.0, "{micros}");
    }
}
