// A device that this machine has always: the CPU's kernels on memory of its own, under the rules of a GPU.
//
// It takes the place of a GPU in tests where there is none. Tensors of it cannot meet tensors of the CPU (but for single
// numbers, as on CUDA), NumPy does not read them, backward passes run in a thread of their own. It counts where the CPU
// would wait for a GPU: copies from it, copies to it that are asked to be waited for, and operations whose results have
// a size that depends on values. What it cannot show: speed, memory, streams, atomics, cuDNN, NCCL itself.

#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using std::optional;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);
int64_t num_waits = 0;

// From the interface: in torch 2.8 nothing may be derived from NoOpDeviceGuardImpl.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  static void release(void* pointer) { c10::free_cpu(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::alloc_cpu(bytes);
    return {pointer, pointer, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};
Hooks hooks;
const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

void grow(const c10::Storage& storage, size_t bytes) {
  auto data = memory.allocate(bytes);
  std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

Tensor make_empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
                  optional<bool>, optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, at::dtype_or_default(dtype), format);
}

Tensor make_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                    optional<at::Device>, optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, at::dtype_or_default(dtype));
}

// A tensor of the CPU on the same memory.
Tensor shared(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone()) return tensor;
  const c10::Storage& there = tensor.storage();
  c10::Storage here(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), there.nbytes(), c10::DataPtr(there.mutable_data(), c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), true));
  Tensor found = at::detail::empty_cpu({0}, tensor.scalar_type());
  at::AutoDispatchBelowAutograd below;
  return found.set_(here, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

Tensor moved(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_privateuseone()) return tensor;
  auto found = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
  shared(found).copy_(tensor);
  return found;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_upload = to.device().is_privateuseone();
  num_waits += !is_upload || (!from.device().is_privateuseone() && !non_blocking);
  at::AutoDispatchBelowAutograd below;
  shared(to).copy_(shared(from));
  return to;
}

at::Scalar read_number(const Tensor& tensor) {
  ++num_waits;
  return shared(tensor).item();
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return tensor;
}

Tensor& set_to(Tensor& tensor, const Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef size, optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t bytes = tensor.dtype().itemsize();
  for (auto length : sizes) bytes *= length;
  bytes += tensor.storage_offset() * tensor.dtype().itemsize();
  if (tensor.storage().nbytes() < bytes) grow(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor mse_loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  TORCH_CHECK(input.device() == target.device(), "Expected all tensors to be on the same device, in mse_loss");
  at::AutoDispatchBelowAutograd below;
  return moved(at::mse_loss(shared(input), shared(target), reduction));
}

Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const bool has_bias = bias && bias->defined();
  TORCH_CHECK(input.device() == weight.device() && (!has_bias || bias->device() == input.device()),
              "Expected all tensors to be on the same device, in convolution");
  at::AutoDispatchBelowAutograd below;
  return moved(at::convolution(shared(input), shared(weight), has_bias ? optional<Tensor>(shared(*bias)) : bias, stride,
                               padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowAutograd below;
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward(shared(grad), shared(input), shared(weight), bias_sizes, stride, padding, dilation,
                               transposed, output_padding, groups, mask);
  return {moved(of_input), moved(of_weight), moved(of_bias)};
}

// Applies a function to the tensors of one argument or result.
template <typename Function>
void replace_tensors(IValue& value, const Function& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<optional<Tensor>> tensors;
    for (optional<Tensor> tensor : value.toOptionalTensorList().vec())
      tensors.push_back(tensor ? optional<Tensor>(function(*tensor)) : tensor);
    value = tensors;
  }
}

// Any other operation: the CPU's kernel on the same memory.
void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // From the CPU, too, as on CUDA.
  static const std::unordered_set<std::string> take_indices = {"aten::index", "aten::index_put_",
                                                               "aten::_index_put_impl_", "aten::index_put"};
  static const std::unordered_set<std::string> wait = {
      "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  std::vector<std::pair<Tensor, Tensor>> seen;  // of the device, of the CPU
  bool is_of_cpu = false, is_of_device = false, waits = wait.count(schema.name());
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    const bool is_index = take_indices.count(schema.name()) && value.isOptionalTensorList();
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      is_of_device = true;
      value = c10::Device(c10::kCPU);
    }
    replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      if (!tensor.defined()) return tensor;
      if (!tensor.device().is_privateuseone()) {
        is_of_cpu |= tensor.dim() > 0 && !is_index;
        waits |= is_index;  // until it is there
        return tensor;
      }
      is_of_device = true;
      waits |= is_index && tensor.scalar_type() == at::kBool;
      for (auto& [there, here] : seen)
        if (there.is_same(tensor)) return here;
      seen.emplace_back(tensor, shared(tensor));
      return seen.back().second;
    });
  }
  TORCH_CHECK(!(is_of_cpu && is_of_device), "Expected all tensors to be on the same device, in ", schema.name());
  num_waits += is_of_device && waits;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [there, here] : seen)
    if (here.sizes() != there.sizes() || here.strides() != there.strides()) {
      there.resize_(here.sizes());
      shared(there).copy_(here);
    }
  at::AutoDispatchBelowAutograd below;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const Tensor& tensor) -> Tensor {
      for (auto& [there, here] : seen)
        if (here.is_same(tensor)) return there;
      return is_of_device ? moved(tensor) : tensor;
    });
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", make_empty);
  m.impl("empty_strided", make_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_number);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("alias", at::native::alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_to);
  m.impl("resize_", resize);
  m.impl("mse_loss", mse_loss);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>()); }

TORCH_LIBRARY(test_device, m) {
  m.def("num_waits() -> int", []() { return num_waits; });
}
