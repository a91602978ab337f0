// A device that torch calls `cuda` and that does nothing: what tensors without numbers need to be on one. torch's own
// build for CPUs has none, so autograd and `Tensor.to` refuse the name.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct Nothing final : CUDAHooksInterface {
  explicit Nothing(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Nothing)
} // namespace at

namespace {
using namespace c10;
const Device there(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return there; }
  Device exchangeDevice(Device) const override { return there; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, there); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, there); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, there); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
} // namespace
