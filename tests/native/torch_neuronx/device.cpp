// A PrivateUse1 device in host memory: every operator runs on the host, and those that were declared missing are noted.
//
// A stand-in for tests: it shows that our code keeps the rules of such a device, and nothing about Trainium.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

// Of ATen/autocast_mode.h, which brings in all of ATen: half of what this file would take to compile.
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
TORCH_API ScalarType get_autocast_dtype(DeviceType);
} // namespace at::autocast

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> allocated_bytes{0};
std::atomic<bool> touched{false};
std::mutex lock;
std::set<std::string> missing;
std::map<std::string, int64_t> fell_back;
std::map<std::string, std::set<int64_t>> odd;
thread_local int within_graph = 0;
constexpr int64_t kMultiple = 128;

struct Allocation {
  void* data;
  size_t bytes;
};

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  allocated_bytes -= static_cast<int64_t>(allocation->bytes);
  c10::free_cpu(allocation->data);
  delete allocation;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    touched = true;
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    allocated_bytes += static_cast<int64_t>(bytes);
    return {data, new Allocation{data, bytes}, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// One device and one stream: each rank sees its own core, with index 0.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return c10::Device(kDevice, 0);
  }
  c10::Device getDevice() const override {
    return c10::Device(kDevice, 0);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "Invalid device id: ", static_cast<int>(device.index()), ". Valid range is 0 to 0");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(false, "pinned memory is not supported on neuron");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocator.allocate(bytes);
    auto kept = std::min(bytes, storage.nbytes());
    if (kept) {
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr(std::move(fresh));
    storage.set_nbytes(bytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
};

Hooks hooks;

void check(std::optional<at::ScalarType> type, std::optional<at::Device> device) {
  if (device) {
    Guard().setDevice(*device);
  }
  TORCH_CHECK(
      c10::dtype_or_default(type) != at::kDouble,
      "[NCC_ESPP004] f64 is not supported on this device: float64 tensors stay on the host");
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  check(type, device);
  TORCH_CHECK(!pinned.value_or(false), "pinned memory is not supported on neuron");
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  check(type, device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(type));
}

// The same memory, as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto bytes = self.storage_offset() * self.itemsize() + c10::multiply_integers(size) * self.itemsize();
  if (static_cast<int64_t>(self.storage().nbytes()) < bytes) {
    hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::_local_scalar_dense(on_host(self));
}

bool is_pinned(const at::Tensor&, std::optional<at::Device>) {
  return false;
}

// Eager kernels are slow on vectors whose length is no multiple of 128.
void note_odd(const std::string& name, const torch::jit::Stack& stack, size_t arguments) {
  auto look = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().is_privateuseone() && tensor.numel() > kMultiple && tensor.numel() % kMultiple) {
      std::lock_guard<std::mutex> held(lock);
      odd[name].insert(tensor.numel());
    }
  };
  for (const auto& value : torch::jit::last(stack, arguments)) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) {
        look(tensor);
      }
    }
  }
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& name = operation.schema().name();
  {
    std::lock_guard<std::mutex> held(lock);
    if (missing.count(name)) {
      fell_back[name] += 1;
    }
  }
  if (!within_graph) {
    note_odd(name, *stack, operation.schema().arguments().size());
  }
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("is_pinned", is_pinned);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators without a derivative, such as collectives: torch 2.9 passes them on for its own devices alone.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The products, as every device has them.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

at::Tensor lower(const at::Tensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), tensor, kDevice);
}

using Plain = c10::impl::ExcludeDispatchKeyGuard;
constexpr auto kAutocast = c10::DispatchKey::AutocastPrivateUse1;

at::Tensor autocast_addmm(
    const at::Tensor& self,
    const at::Tensor& left,
    const at::Tensor& right,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  Plain guard(kAutocast);
  return at::addmm(lower(self), lower(left), lower(right), beta, alpha);
}

at::Tensor autocast_bmm(const at::Tensor& left, const at::Tensor& right) {
  Plain guard(kAutocast);
  return at::bmm(lower(left), lower(right));
}

at::Tensor autocast_linear(
    const at::Tensor& values, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  Plain guard(kAutocast);
  return at::linear(lower(values), lower(weight), bias ? std::optional(lower(*bias)) : bias);
}

at::Tensor autocast_matmul(const at::Tensor& left, const at::Tensor& right) {
  Plain guard(kAutocast);
  return at::matmul(lower(left), lower(right));
}

at::Tensor autocast_mm(const at::Tensor& left, const at::Tensor& right) {
  Plain guard(kAutocast);
  return at::mm(lower(left), lower(right));
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  m.impl("addmm", autocast_addmm);
  m.impl("bmm", autocast_bmm);
  m.impl("linear", autocast_linear);
  m.impl("matmul", autocast_matmul);
  m.impl("mm", autocast_mm);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_missing", [](std::set<std::string> names) {
    std::lock_guard<std::mutex> held(lock);
    missing = std::move(names);
  });
  m.def("fell_back", [] {
    std::lock_guard<std::mutex> held(lock);
    return fell_back;
  });
  m.def("clear", [] {
    std::lock_guard<std::mutex> held(lock);
    fell_back.clear();
  });
  m.def("enter_graph", [] { ++within_graph; });
  m.def("leave_graph", [] { --within_graph; });
  m.def("odd_lengths", [] {
    std::lock_guard<std::mutex> held(lock);
    auto found = std::move(odd);
    odd.clear();
    return found;
  });
  m.def("allocated_bytes", [] { return allocated_bytes.load(); });
  m.def("is_touched", [] { return touched.load(); });
  m.def("on_host", &on_host);
}
