//! Messages between ranks: within the process, or through a folder that several processes see.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::report::lock;
use crate::settings::settings;

/// After this time, a wait prints the message that it waits for.
const LONG: Duration = Duration::from_secs(10);
/// The time between two looks into the folder.
const LOOK: Duration = Duration::from_micros(200);

static BOX: Mutex<Option<HashMap<String, Vec<u8>>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn path(folder: &Path, key: &str) -> PathBuf {
    folder.join(key.replace('/', "."))
}

/// Sends a message. Its key is used once.
pub fn post(key: &str, bytes: Vec<u8>) {
    if let Some(folder) = &settings().mail {
        let (path, begun) = (path(folder, key), path(folder, &format!("{key}.begun")));
        let written = fs::write(&begun, bytes).and_then(|()| fs::rename(&begun, &path));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    lock(&BOX).get_or_insert_default().insert(key.to_owned(), bytes);
    CHANGED.notify_all();
}

/// Waits for a message and takes it. Returns nothing once `is_over`.
pub fn take(key: &str, is_over: impl Fn() -> bool) -> Option<Vec<u8>> {
    let look = |letters: &mut HashMap<String, Vec<u8>>| letters.remove(key);
    let open = |folder: &Path| {
        let path = path(folder, key);
        let bytes = fs::read(&path).ok()?;
        // Only this rank takes the message.
        fs::remove_file(&path).ok().map(|()| bytes)
    };
    wait(&format!("message {key}"), is_over, look, open)
}

/// Waits until a message has been taken.
pub fn wait_taken(key: &str, is_over: impl Fn() -> bool) {
    let look = |letters: &mut HashMap<String, Vec<u8>>| (!letters.contains_key(key)).then_some(());
    let open = |folder: &Path| (!path(folder, key).exists()).then_some(());
    wait(&format!("the peer to take message {key}"), is_over, look, open);
}

/// Wakes the waits, some of which may be over.
pub fn wake() {
    CHANGED.notify_all();
}

fn wait<T>(
    what: &str,
    is_over: impl Fn() -> bool,
    look: impl Fn(&mut HashMap<String, Vec<u8>>) -> Option<T>,
    open: impl Fn(&Path) -> Option<T>,
) -> Option<T> {
    let mut told = Instant::now();
    let mut hold = lock(&BOX);
    loop {
        let found = match &settings().mail {
            Some(folder) => open(folder),
            None => look(hold.get_or_insert_default()),
        };
        if found.is_some() || is_over() {
            // The sender may wait for the message to be taken.
            CHANGED.notify_all();
            return found;
        }
        if told.elapsed() > LONG {
            eprintln!("stand-in: NCCL still waits for {what}");
            told = Instant::now();
        }
        hold = pause(hold);
    }
}

fn pause(
    hold: MutexGuard<'static, Option<HashMap<String, Vec<u8>>>>,
) -> MutexGuard<'static, Option<HashMap<String, Vec<u8>>>> {
    if settings().mail.is_some() {
        drop(hold);
        thread::sleep(LOOK);
        return lock(&BOX);
    }
    CHANGED.wait_timeout(hold, LONG).unwrap_or_else(PoisonError::into_inner).0
}
