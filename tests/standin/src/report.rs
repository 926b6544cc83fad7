//! What a test learns of the calls, complaints and a log, and the calls that it lets fail.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::File;
use std::io::Write as _;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::settings::settings;

/// Locks a mutex. A panic elsewhere does not make its contents wrong.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(vec![]);

/// Reports a misuse that the real driver would punish later, or elsewhere, or never.
pub fn complain(text: String) {
    eprintln!("stand-in: {text}");
    log(&text);
    lock(&COMPLAINTS).push(text);
}

/// Writes a line to the log.
pub fn log(line: &str) {
    static LOG: LazyLock<Option<Mutex<File>>> = LazyLock::new(|| {
        let path = settings().log.as_ref()?;
        let file = File::options().create(true).append(true).open(path);
        Some(Mutex::new(file.unwrap_or_else(|error| panic!("{}: {error}", path.display()))))
    });
    if let Some(file) = &*LOG {
        // A log that can't be written must not stop a program.
        let _ = writeln!(lock(file), "{:?} {line}", std::thread::current().id());
    }
}

/// Whether there is a log, which costs the making of its lines.
pub fn has_log() -> bool {
    settings().log.is_some()
}

/// A call that is to fail.
#[derive(Debug)]
struct Fault {
    call: String,
    device: Option<usize>,
    /// Words in the description of the call.
    about: String,
    /// Which of these calls, from 1 on; 0 for each.
    nth: u64,
    /// The code that the call returns. 0 lets the call do nothing and succeed.
    code: c_int,
    seen: u64,
}

static FAULTS: LazyLock<Mutex<Vec<Fault>>> =
    LazyLock::new(|| Mutex::new(faults(&std::env::var("STANDIN_FAIL").unwrap_or_default())));

/// Reads faults: `call=NAME device=D about=WORDS nth=N code=C`, separated by semicolons. Only the
/// call must be given.
fn faults(text: &str) -> Vec<Fault> {
    let one = |text: &str| {
        let part = |name: &str| {
            let found = text.split_whitespace().find_map(|part| part.strip_prefix(name));
            found.and_then(|rest| rest.strip_prefix('='))
        };
        let number = |name| part(name).map(|text| text.parse().expect("a whole number"));
        Fault {
            call: part("call").expect("call=NAME").to_owned(),
            device: number("device").map(|device: u64| device as usize),
            about: part("about").unwrap_or_default().to_owned(),
            nth: number("nth").unwrap_or(1),
            code: number("code").unwrap_or(700) as c_int,
            seen: 0,
        }
    };
    text.split(';').filter(|text| !text.trim().is_empty()).map(one).collect()
}

/// Returns the code that this call shall return instead of doing its work, if a test asked for one.
pub fn fault(call: &str, device: usize, about: &str) -> Option<c_int> {
    let mut faults = lock(&FAULTS);
    let fits = faults.iter_mut().filter(|fault| {
        fault.call == call
            && fault.device.is_none_or(|wanted| wanted == device)
            && about.contains(&fault.about)
    });
    let mut code = None;
    for fault in fits {
        fault.seen += 1;
        if fault.nth == 0 || fault.nth == fault.seen {
            code = Some(fault.code);
        }
    }
    if code.is_some() {
        log(&format!("{call} of device {device} fails as asked: {about}"));
    }
    code
}

/// Sets the calls that fail from now on; an empty text sets none.
///
/// # Safety
/// The caller must pass a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_fail(text: *const c_char) {
    // SAFETY: the caller passes a C string.
    let text = unsafe { CStr::from_ptr(text) };
    *lock(&FAULTS) = faults(&text.to_string_lossy());
}

/// Returns the complaints since the last call, one in a line, and forgets them. The text stays
/// until the next call.
#[unsafe(no_mangle)]
extern "C" fn standin_complaints() -> *const c_char {
    static TEXT: Mutex<Option<CString>> = Mutex::new(None);
    let text = std::mem::take(&mut *lock(&COMPLAINTS)).join("\n");
    let text = CString::new(text).unwrap_or_default();
    lock(&TEXT).insert(text).as_ptr()
}

/// Lets all lost devices work again, which no real device does.
#[unsafe(no_mangle)]
extern "C" fn standin_mend() -> c_int {
    crate::device::mend();
    0
}
