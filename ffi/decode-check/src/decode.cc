#include "decode.h"

#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>

#include "burst-attention-decode-check/src/lib.rs.h"
#include "xla/ffi/api/ffi.h"

namespace decode_check {
namespace {

namespace ffi = xla::ffi;

using Body = std::function<Decoded(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary)>;

Decoded refused(std::string_view message) {
  return Decoded{false, rust::String(message.data(), message.size())};
}

Decoded accepted(const std::string& text) { return Decoded{true, rust::String(text)}; }

// Returns the message of an error that a handler returned, and frees the error.
std::string take(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_GetDetails_Args details{};
  details.struct_size = XLA_FFI_Error_GetDetails_Args_STRUCT_SIZE;
  details.error = error;
  api->XLA_FFI_Error_GetDetails(&details);
  std::string message = details.message;
  XLA_FFI_Error_Destroy_Args destroy{};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return message;
}

// Calls a handler with the frame, so that XLA checks the frame itself first.
Decoded call(std::size_t address, const Body& body) {
  auto* frame = reinterpret_cast<XLA_FFI_CallFrame*>(address);
  Decoded decoded = refused("not called");
  auto handler = ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(
      [&](ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
        decoded = body(args, rets, attributes);
        return ffi::Error::Success();
      });
  if (XLA_FFI_Error* error = handler->Call(frame)) return refused(take(frame->api, error));
  return decoded;
}

template <typename Buffer>
std::string describe(const Buffer& buffer) {
  std::ostringstream text;
  text << static_cast<unsigned>(buffer.element_type()) << " [";
  for (std::int64_t dim : buffer.dimensions()) text << dim << ",";
  text << "] at " << reinterpret_cast<std::uintptr_t>(buffer.untyped_data()) << " "
       << buffer.element_count() << " elements " << buffer.size_bytes() << " bytes";
  return text.str();
}

template <typename T>
std::string hex(const T* values, std::size_t count) {
  static const char digits[] = "0123456789abcdef";
  std::string bytes(count * sizeof(T), '\0'), text;
  if (!bytes.empty()) std::memcpy(bytes.data(), values, bytes.size());
  for (unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// Operands are buffers, results are pointers to buffers.
template <typename T>
const T& unwrap(const T& buffer) { return buffer; }
template <typename T>
const T& unwrap(const ffi::Result<T>& buffer) { return *buffer; }

template <typename Buffer, typename Remaining>
Decoded buffer(const Remaining& all, std::size_t index) {
  auto found = all.template get<Buffer>(index);
  if (!found.has_value()) return refused(found.error().message());
  return accepted(describe(unwrap(*found)));
}

template <ffi::DataType dtype, typename Remaining>
Decoded ranked(const Remaining& all, std::size_t index, std::int64_t rank) {
  switch (rank) {
    case 0: return buffer<ffi::Buffer<dtype, 0>>(all, index);
    case 1: return buffer<ffi::Buffer<dtype, 1>>(all, index);
    case 4: return buffer<ffi::Buffer<dtype, 4>>(all, index);
    default: return buffer<ffi::Buffer<dtype>>(all, index);
  }
}

template <typename Remaining>
Decoded typed(const Remaining& all, std::size_t index, std::uint32_t dtype, std::int64_t rank) {
  switch (dtype) {
    case XLA_FFI_DataType_F32: return ranked<ffi::F32>(all, index, rank);
    case XLA_FFI_DataType_BF16: return ranked<ffi::BF16>(all, index, rank);
    case XLA_FFI_DataType_S32: return ranked<ffi::S32>(all, index, rank);
    default: return buffer<ffi::AnyBuffer>(all, index);
  }
}

template <typename T>
Decoded number(const ffi::Dictionary& attributes, std::string_view name, bool array) {
  if (array) {
    if constexpr (!std::is_same_v<T, bool>) {
      auto found = attributes.get<ffi::Span<const T>>(name);
      if (!found.has_value()) return refused(found.error().message());
      return accepted(hex(found->begin(), found->size()));
    }
    return refused("XLA has no arrays of bool");
  }
  auto found = attributes.get<T>(name);
  if (!found.has_value()) return refused(found.error().message());
  return accepted(hex(&*found, 1));
}

Decoded entry(const ffi::Dictionary& attributes, std::string_view name, std::uint32_t kind,
              std::uint32_t dtype) {
  if (kind == XLA_FFI_AttrType_STRING) {
    auto found = attributes.get<std::string_view>(name);
    if (!found.has_value()) return refused(found.error().message());
    return accepted(hex(found->data(), found->size()));
  }
  if (kind == XLA_FFI_AttrType_DICTIONARY) {
    auto found = attributes.get<ffi::Dictionary>(name);
    if (!found.has_value()) return refused(found.error().message());
    std::string names;
    for (std::string_view key : *found) names.append(key).append(",");
    return accepted(names);
  }
  bool array = kind == XLA_FFI_AttrType_ARRAY;
  switch (dtype) {
    case XLA_FFI_DataType_PRED: return number<bool>(attributes, name, array);
    case XLA_FFI_DataType_S8: return number<std::int8_t>(attributes, name, array);
    case XLA_FFI_DataType_S16: return number<std::int16_t>(attributes, name, array);
    case XLA_FFI_DataType_S32: return number<std::int32_t>(attributes, name, array);
    case XLA_FFI_DataType_S64: return number<std::int64_t>(attributes, name, array);
    case XLA_FFI_DataType_U8: return number<std::uint8_t>(attributes, name, array);
    case XLA_FFI_DataType_U16: return number<std::uint16_t>(attributes, name, array);
    case XLA_FFI_DataType_U32: return number<std::uint32_t>(attributes, name, array);
    case XLA_FFI_DataType_U64: return number<std::uint64_t>(attributes, name, array);
    case XLA_FFI_DataType_F32: return number<float>(attributes, name, array);
    case XLA_FFI_DataType_F64: return number<double>(attributes, name, array);
    default: return refused("not a type of attributes");
  }
}

}  // namespace

Decoded argument(std::size_t frame, std::size_t index, std::uint32_t dtype, std::int64_t rank) {
  return call(frame, [&](auto args, auto, auto) { return typed(args, index, dtype, rank); });
}

Decoded result(std::size_t frame, std::size_t index, std::uint32_t dtype, std::int64_t rank) {
  return call(frame, [&](auto, auto rets, auto) { return typed(rets, index, dtype, rank); });
}

Decoded attribute(std::size_t frame, rust::Str dictionary, rust::Str name, std::uint32_t kind,
                  std::uint32_t dtype) {
  std::string_view key(name.data(), name.size()), outer(dictionary.data(), dictionary.size());
  return call(frame, [&](auto, auto, ffi::Dictionary attributes) {
    if (outer.empty()) return entry(attributes, key, kind, dtype);
    auto inner = attributes.get<ffi::Dictionary>(outer);
    if (!inner.has_value()) return refused(inner.error().message());
    return entry(*inner, key, kind, dtype);
  });
}

Decoded signature(std::size_t address) {
  auto* frame = reinterpret_cast<XLA_FFI_CallFrame*>(address);
  auto handler = ffi::Ffi::Bind()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .To([](ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
                       return ffi::Error::Success();
                     });
  if (XLA_FFI_Error* error = handler->Call(frame)) return refused(take(frame->api, error));
  return accepted("");
}

}  // namespace decode_check
