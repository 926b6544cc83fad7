// XLA's own decoding of a call frame, as text.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rust/cxx.h"

namespace decode_check {

struct Decoded;

Decoded argument(std::size_t frame, std::size_t index, std::uint32_t dtype, std::int64_t rank);
Decoded result(std::size_t frame, std::size_t index, std::uint32_t dtype, std::int64_t rank);
Decoded attribute(std::size_t frame, rust::Str dictionary, rust::Str name, std::uint32_t kind,
                  std::uint32_t dtype);
Decoded signature(std::size_t frame);

}  // namespace decode_check
