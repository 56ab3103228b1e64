/* A libcuda.so.1 for a machine without a driver: every entry answers 100, CUDA_ERROR_NO_DEVICE.
   The symbols are those that sglang-kernel leaves undefined (nm -D --undefined-only sgl_kernel/ ... .so), so that it
   can be imported; what looks entries up at run time finds no device either. 0.4.5 and 0.4.10 want the first ones, and
   0.4.2.post2 (sglang 0.5.12.post1), which links to the driver's virtual memory as well, also those of cuMem. */
#define NO_DEVICE 100
#define ENTRY(name) int name(void) { return NO_DEVICE; }
ENTRY(cuCtxFromGreenCtx)
ENTRY(cuCtxPopCurrent_v2)
ENTRY(cuCtxPushCurrent_v2)
ENTRY(cuDevResourceGenerateDesc)
ENTRY(cuDevSmResourceSplitByCount)
ENTRY(cuDeviceGetDevResource)
ENTRY(cuDriverGetVersion)
ENTRY(cuGetErrorString)
ENTRY(cuGetProcAddress_v2)
ENTRY(cuGreenCtxCreate)
ENTRY(cuGreenCtxDestroy)
ENTRY(cuGreenCtxGetDevResource)
ENTRY(cuInit)
ENTRY(cuMemAddressFree)
ENTRY(cuMemGetAddressRange_v2)
ENTRY(cuMemRelease)
ENTRY(cuMemRetainAllocationHandle)
ENTRY(cuMemSetAccess)
ENTRY(cuMemUnmap)
ENTRY(cuPointerGetAttribute)
ENTRY(cuStreamCreate)
