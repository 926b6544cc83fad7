//! The hash that names a kept file.

use sha2::{Digest, Sha256};

/// Returns the first digits of the hash of some parts, which name a kept file.
pub(crate) fn short_hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}
