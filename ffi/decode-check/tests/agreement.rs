//! The library's decoder and XLA's accept the same frames, and read the same fields.

use std::ffi::c_void;

use burst_attention_decode_check::{Decoded, Reference};
use burst_attention_ffi::attributes::Attributes;
use burst_attention_ffi::buffer::Buffer;
use burst_attention_ffi::data_type::DataType;
use burst_attention_ffi::error::{Error, Result};
use burst_attention_ffi::frame::CallFrame;
use burst_attention_ffi::sys;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime};

const ANY: i64 = -1;
const RANKS: [i64; 4] = [ANY, 0, 1, 4];
const DTYPES: [u32; 4] = [
    sys::XLA_FFI_DataType_INVALID, // any
    sys::XLA_FFI_DataType_F32,
    sys::XLA_FFI_DataType_BF16,
    sys::XLA_FFI_DataType_S32,
];

/// Returns a runtime that stays, because frames refer to it.
fn runtime() -> &'static FakeRuntime {
    Box::leak(Box::new(FakeRuntime::new(sys::XLA_FFI_API_MINOR as i32, 0, 0)))
}

/// Returns buffers of many types and ranks, each at an address of its own.
fn buffers() -> Vec<FakeBuffer> {
    let dims: [&[i64]; 7] = [&[], &[1], &[2], &[0], &[3, 0, 5], &[2, 3, 4, 8], &[1, 2, 3, 4, 5, 6]];
    let dtypes = [
        sys::XLA_FFI_DataType_PRED,
        sys::XLA_FFI_DataType_S32,
        sys::XLA_FFI_DataType_U64,
        sys::XLA_FFI_DataType_F16,
        sys::XLA_FFI_DataType_BF16,
        sys::XLA_FFI_DataType_F32,
        sys::XLA_FFI_DataType_C128,
        sys::XLA_FFI_DataType_F8E4M3FN,
    ];
    let all = dtypes.iter().flat_map(|&dtype| dims.iter().map(move |&dims| (dtype, dims)));
    let address = |number: usize| (0x1000 + 64 * number) as *mut c_void;
    all.enumerate().map(|(n, (dtype, dims))| FakeBuffer::new(dtype, dims, address(n))).collect()
}

fn with_frame<T>(
    frame: &mut FakeFrame,
    check: impl FnOnce(Result<CallFrame<'_>>, Reference) -> T,
) -> T {
    let address = frame.address();
    // SAFETY: `FakeFrame` owns everything that it points to, and lives until `check` returns.
    check(unsafe { CallFrame::new(address) }, unsafe { Reference::new(address) })
}

/// Asserts that both decoders accept with the same text or both refuse. Returns whether they
/// accept.
fn agree(ours: Result<String>, theirs: &Decoded, what: &str) -> bool {
    match ours {
        Ok(ours) => {
            assert!(theirs.accepted, "{what}: XLA refuses ({}), we read {ours}", theirs.text);
            assert_eq!(ours, theirs.text, "{what}");
            true
        }
        Err(error) => {
            assert!(!theirs.accepted, "{what}: XLA reads {}, we refuse: {error}", theirs.text);
            false
        }
    }
}

fn describe(buffer: &Buffer) -> String {
    let dims: String = buffer.dims.iter().map(|dim| format!("{dim},")).collect();
    let address = buffer.data("buffer").expect("there is memory").as_ptr() as usize;
    let (elements, bytes) = (buffer.elements(), buffer.bytes());
    format!("{} [{dims}] at {address} {elements} elements {bytes} bytes", buffer.dtype.0)
}

/// Returns one buffer in words, if it has this type and rank.
fn as_type(all: &Result<Vec<Buffer>>, index: usize, dtype: u32, rank: i64) -> Result<String> {
    let all = all.as_ref().map_err(Clone::clone)?;
    let buffer = all.get(index).ok_or_else(|| Error::mismatch("index", "smaller", index))?;
    if dtype != sys::XLA_FFI_DataType_INVALID {
        buffer.typed("buffer", DataType(dtype))?;
        match rank {
            0 => drop(buffer.ranked::<0>("buffer")?),
            1 => drop(buffer.ranked::<1>("buffer")?),
            4 => drop(buffer.ranked::<4>("buffer")?),
            _ => {}
        }
    }
    Ok(describe(buffer))
}

#[test]
fn operands_and_results() {
    let buffers = buffers();
    let mut frame = FakeFrame::new(&buffers, &buffers, Vec::new(), runtime());
    with_frame(&mut frame, |ours, theirs| {
        let ours = ours.expect("a frame");
        let (args, rets) = (ours.all_arguments(), ours.all_results());
        let mut accepted = 0;
        for index in 0..=buffers.len() {
            for (dtype, rank) in DTYPES.iter().flat_map(|&dtype| RANKS.map(|rank| (dtype, rank))) {
                let what = format!("buffer {index} as {} of rank {rank}", DataType(dtype));
                let argument = as_type(&args, index, dtype, rank);
                accepted += u32::from(agree(argument, &theirs.argument(index, dtype, rank), &what));
                let result = as_type(&rets, index, dtype, rank);
                agree(result, &theirs.result(index, dtype, rank), &what);
            }
        }
        assert!(accepted > 250, "only {accepted} were accepted");
    });
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes attribute `name` as a `kind` of `dtype`, with the library's decoder.
fn read(attributes: &Attributes<'_>, name: &str, kind: u32, dtype: u32) -> Result<String> {
    macro_rules! numbers {
        ($($dtype:ident => $native:ty),*) => {
            match (kind, dtype) {
                (sys::XLA_FFI_AttrType_STRING, _) => {
                    Ok(hex(attributes.get::<&str>(name)?.as_bytes()))
                }
                (sys::XLA_FFI_AttrType_DICTIONARY, _) => {
                    let inner: Attributes<'_> = attributes.get(name)?;
                    Ok(inner.names().map(|name| format!("{name},")).collect())
                }
                (sys::XLA_FFI_AttrType_SCALAR, sys::XLA_FFI_DataType_PRED) => {
                    Ok(hex(&[u8::from(attributes.get::<bool>(name)?)]))
                }
                $((sys::XLA_FFI_AttrType_SCALAR, sys::$dtype) => {
                    Ok(hex(&attributes.get::<$native>(name)?.to_ne_bytes()))
                })*
                $((sys::XLA_FFI_AttrType_ARRAY, sys::$dtype) => {
                    let numbers: &[$native] = attributes.get(name)?;
                    Ok(numbers.iter().map(|number| hex(&number.to_ne_bytes())).collect())
                })*
                _ => Err(Error::mismatch("type", "one of attributes", dtype)),
            }
        };
    }
    numbers!(
        XLA_FFI_DataType_S8 => i8, XLA_FFI_DataType_S16 => i16, XLA_FFI_DataType_S32 => i32,
        XLA_FFI_DataType_S64 => i64, XLA_FFI_DataType_U8 => u8, XLA_FFI_DataType_U16 => u16,
        XLA_FFI_DataType_U32 => u32, XLA_FFI_DataType_U64 => u64, XLA_FFI_DataType_F32 => f32,
        XLA_FFI_DataType_F64 => f64
    )
}

/// All types of numbers, with their bytes.
const NUMBERS: [(u32, usize); 11] = [
    (sys::XLA_FFI_DataType_PRED, 1),
    (sys::XLA_FFI_DataType_S8, 1),
    (sys::XLA_FFI_DataType_S16, 2),
    (sys::XLA_FFI_DataType_S32, 4),
    (sys::XLA_FFI_DataType_S64, 8),
    (sys::XLA_FFI_DataType_U8, 1),
    (sys::XLA_FFI_DataType_U16, 2),
    (sys::XLA_FFI_DataType_U32, 4),
    (sys::XLA_FFI_DataType_U64, 8),
    (sys::XLA_FFI_DataType_F32, 4),
    (sys::XLA_FFI_DataType_F64, 8),
];

/// Returns a dictionary with attributes of all kinds.
fn attributes() -> Vec<(String, FakeAttribute)> {
    let mut all = Vec::new();
    let bytes = |width: usize, count: usize| (1..=width * count).map(|b| b as u8).collect();
    for (dtype, width) in NUMBERS {
        all.push((format!("scalar_{dtype}"), FakeAttribute::Scalar(dtype, bytes(width, 1))));
        for count in [0, 3] {
            let array = FakeAttribute::Array(dtype, count, bytes(width, count));
            all.push((format!("array_{dtype}_{count}"), array));
        }
    }
    all.push(("empty".into(), FakeAttribute::Text(String::new())));
    all.push(("text".into(), FakeAttribute::Text("zigzag \0 é".into())));
    all
}

#[test]
fn attributes_of_all_types() {
    let mut all = attributes();
    let mut names: Vec<_> = all.iter().map(|(name, _)| name.clone()).collect();
    names.extend(["missing".into(), "nested".into(), "nothing".into(), String::new()]);
    all.push(("nested".into(), FakeAttribute::Dictionary(attributes())));
    all.push(("nothing".into(), FakeAttribute::Dictionary(Vec::new())));
    let mut frame = FakeFrame::new(&[], &[], all, runtime());
    let kinds = [
        sys::XLA_FFI_AttrType_SCALAR,
        sys::XLA_FFI_AttrType_ARRAY,
        sys::XLA_FFI_AttrType_STRING,
        sys::XLA_FFI_AttrType_DICTIONARY,
    ];
    with_frame(&mut frame, |ours, theirs| {
        let ours = ours.and_then(|frame| frame.attributes()).expect("attributes");
        let mut accepted = 0;
        for outer in ["", "nested", "nothing", "missing", "text"] {
            let dictionary =
                if outer.is_empty() { Ok(ours.clone()) } else { ours.get::<Attributes<'_>>(outer) };
            for name in &names {
                for (kind, (dtype, _)) in kinds.iter().flat_map(|&k| NUMBERS.map(|n| (k, n))) {
                    let what = format!("{outer}/{name} as {kind} of {}", DataType(dtype));
                    let ours = dictionary.clone().and_then(|all| read(&all, name, kind, dtype));
                    let theirs = theirs.attribute(outer, name, kind, dtype);
                    accepted += u32::from(agree(ours, &theirs, &what));
                }
            }
        }
        assert!(accepted > 60, "only {accepted} were accepted");
    });
}

/// Decodes the frame as XLA's `signature` does, with the library's decoder.
fn signature(frame: Result<CallFrame<'_>>) -> Result<String> {
    let frame = frame?;
    frame.expect_stage(sys::XLA_FFI_ExecutionStage_EXECUTE)?;
    frame.arguments::<2>()?;
    frame.results::<1>()?;
    Ok(String::new())
}

#[test]
fn malformed_frames_are_refused_by_both() {
    let all = buffers();
    let check = |args: usize, rets: usize, change: &dyn Fn(&mut sys::XLA_FFI_CallFrame)| {
        let mut frame = FakeFrame::new(&all[..args], &all[..rets], Vec::new(), runtime());
        change(&mut frame.raw);
        with_frame(&mut frame, |ours, theirs| {
            agree(signature(ours), &theirs.signature(), &format!("{args} operands, {rets} results"))
        })
    };
    assert!(check(2, 1, &|_| ()), "a good frame");
    for (args, rets) in [(0, 1), (1, 1), (3, 1), (2, 0), (2, 2)] {
        assert!(!check(args, rets, &|_| ()));
    }
    let size = sys::XLA_FFI_CallFrame_STRUCT_SIZE as usize;
    for size in [size - 1, size - 8, 32] {
        assert!(!check(2, 1, &|frame| frame.struct_size = size));
    }
    for stage in 0..=4 {
        let taken = check(2, 1, &|frame| frame.stage = stage);
        assert_eq!(taken, stage == sys::XLA_FFI_ExecutionStage_EXECUTE);
    }
    assert!(!check(2, 1, &|frame| frame.args.size = -1));
    assert!(!check(2, 1, &|frame| frame.rets.size = i64::MIN));
}

#[test]
fn frames_that_xla_trusts_are_refused_here() {
    let good = FakeBuffer::new(sys::XLA_FFI_DataType_F32, &[2, 2], std::ptr::dangling_mut());
    let refused = |change: &dyn Fn(&mut FakeBuffer)| {
        let mut buffer = good.clone();
        change(&mut buffer);
        let mut frame = FakeFrame::new(&[buffer], &[], Vec::new(), runtime());
        with_frame(&mut frame, |ours, _| ours.and_then(|frame| frame.all_arguments()).is_err())
    };
    assert!(!refused(&|_| ()));
    // XLA's header runs off the end of a function when it prints a type or stage that it lacks.
    assert!(refused(&|buffer| buffer.kind = 2));
    assert!(refused(&|buffer| buffer.struct_size = 16));
    assert!(refused(&|buffer| buffer.dims[1] = -1));
    assert!(refused(&|buffer| buffer.dims = vec![i64::MAX, 2]));

    let mut frame = FakeFrame::new(std::slice::from_ref(&good), &[], attributes(), runtime());
    frame.raw.attrs.names = std::ptr::null_mut();
    frame.raw.args.args = std::ptr::null_mut();
    with_frame(&mut frame, |ours, _| {
        let ours = ours.expect("a frame");
        assert!(ours.all_arguments().is_err() && ours.attributes().is_err());
    });

    // A longer frame comes from a newer runtime. XLA's header refuses it, because C++ handlers are
    // compiled again for a newer runtime.
    let mut frame = FakeFrame::new(&[good], &[], Vec::new(), runtime());
    frame.raw.struct_size += 8;
    with_frame(&mut frame, |ours, theirs| {
        assert!(ours.is_ok() && !theirs.argument(0, 0, ANY).accepted);
    });
}
