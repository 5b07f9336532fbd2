// What PyTorch's CPU build lacks of a CUDA device before tensors may say that they are on one:
// that there are two devices, that being on one of them needs nothing, generators, and which
// kernel attention takes. Loaded before PyTorch, which asks once. Nothing here computes; device.py does.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
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

// The order of sdp_utils.cpp (check_prefer_cudnn_attention) on a GPU of compute capability 9.0 with
// cuDNN 9.15 and later: cuDNN, flash, memory-efficient, math; of what each takes, what we give it.
int64_t attention_kernel(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double, bool causal, std::optional<double>,
    bool grouped) {
  using at::SDPBackend;
  const auto& context = at::globalContext();
  const auto size = query.sym_size(-1);
  const bool half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  const bool even = size == value.sym_size(-1) && size % 8 == 0;
  auto found = SDPBackend::math;
  if (context.userEnabledCuDNNSDP() && half && even && size <= 128) {
    found = SDPBackend::cudnn_attention;
  } else if (
      context.userEnabledFlashSDP() && half && even && size <= 256 && !mask.has_value() &&
      (!causal || query.sym_size(-2) == key.sym_size(-2))) {
    found = SDPBackend::flash_attention;
  } else if (context.userEnabledMemEfficientSDP() && !grouped) {
    found = SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(found);
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
