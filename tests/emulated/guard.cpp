// What PyTorch's CPU build lacks of a CUDA device before tensors may say that they are on one:
// that there are two devices, that being on one of them needs nothing, generators, and which
// kernel attention takes. Loaded before PyTorch, which asks once. Nothing here computes; device.py does.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 2;

// Autograd runs a thread per device, and records and waits for events between them.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    c10::DeviceIndex index = device.has_index() ? device.index() : 0;
    return c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::CUDA, index});
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

const Guard guard;

// The CPU's, under another name: device.py lends its state to one of the CPU for a draw.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = {c10::DeviceType::CUDA, index < 0 ? c10::DeviceIndex{0} : index};
  }
};

// As sdp_utils.cpp on a GPU of compute capability 8.0 and more, where there is a mask.
int64_t attention_kernel(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool grouped) {
  using at::SDPBackend;
  return static_cast<int64_t>(grouped ? SDPBackend::math : SDPBackend::efficient_attention);
}

struct Registered {
  Registered() {
    auto place = static_cast<size_t>(c10::DeviceType::CUDA);
    c10::impl::device_guard_impl_registry[place].store(&guard);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  }
} registered;

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<DeviceGenerator>(index);
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
