/* A simulated libcuda.so.1: enumeration only, in the order that the state file's "cuda.order"
 * (UUIDs, most capable first) gives, or in NVML's under CUDA_DEVICE_ORDER=PCI_BUS_ID.
 */
#include "state.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

#define MAX_DEVICES 32
static int started, device_count;
static char uuids[MAX_DEVICES][96];

int cuInit(unsigned flags) {
    (void)flags;
    int failed = enter("cuInit", "system");
    if (failed) return failed;
    if (started) return SUCCESS;
    /* as the real one: the environment counts once, at the start */
    char order[MAX_DEVICES * 96];
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    int by_pci = wanted && strcmp(wanted, "PCI_BUS_ID") == 0;
    if (!by_pci && state_get("cuda.order", order, sizeof order)) {
        char *rest = order;
        for (char *item; device_count < MAX_DEVICES && (item = strtok_r(rest, " ", &rest));)
            snprintf(uuids[device_count++], sizeof uuids[0], "%s", item);
    } else {
        int gpus = (int)state_number("gpus", 0);
        for (int i = 0; i < gpus && i < MAX_DEVICES; i++) {
            char key[32];
            snprintf(key, sizeof key, "gpu.%d.uuid", i);
            if (state_get(key, uuids[device_count], sizeof uuids[0])) device_count++;
        }
    }
    started = 1;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    int failed = enter("cuDeviceGetCount", "system");
    if (failed) return failed;
    if (!started) return NOT_INITIALIZED;
    *count = device_count;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    int failed = enter("cuDeviceGet", "system");
    if (failed) return failed;
    if (!started) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char *out, int device) {
    int failed = enter("cuDeviceGetUuid_v2", "system");
    if (failed) return failed;
    if (!started) return NOT_INITIALIZED;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    const char *digits = strchr(uuids[device], '-');
    for (int i = 0; i < 16; i++) {
        while (digits && *digits == '-') digits++;
        unsigned byte;
        if (!digits || sscanf(digits, "%2x", &byte) != 1) return INVALID_VALUE;
        out[i] = (unsigned char)byte;
        digits += 2;
    }
    return SUCCESS;
}
