// NVML with one GPU, at bus 0000:00:00: 37 %, 3 of 8 GiB, 250.5 W.
#include <cstring>

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  static int gpu;
  *device = &gpu;
  return std::strcmp(bus, "00000000:00:00.0") == 0 ? 0 : 6;
}

int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
  rates[0] = 37;
  rates[1] = 11;
  return 0;
}

int nvmlDeviceGetMemoryInfo(void*, unsigned long long* memory) {
  memory[0] = 8ull << 30;
  memory[1] = 5ull << 30;
  memory[2] = 3ull << 30;
  return 0;
}

int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 250'500;
  return 0;
}
}
