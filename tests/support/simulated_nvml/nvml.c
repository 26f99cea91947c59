/* A simulated libnvidia-ml.so.1: the symbols that nvidia-ml-py asks for, answered from a file.
 *
 * Keys, one a line: gpus N, driver TEXT, gpu.I.{uuid,name,pci,total,free,used,reserved,util,
 * compute_mode,mig,compute,graphics}, gpu.I.mig.J.{uuid,name,total,free,used,reserved,…},
 * error.FUNCTION.{LABEL,all} CODE, hang.FUNCTION.LABEL 1. A label is "I", "I.mig.J" or "system".
 * A process list is "PID:BYTES PID:-", where - is the driver's "not available".
 */
#include "state.h"

#include <stdint.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    VERSION_MISMATCH = 25
};

#define MAX_SLICES 16

/* A handle is generation, GPU and slice in one word: one from before a fork is stale. */
typedef uintptr_t device_t;
static int initialized_pid;
static unsigned generation;

static device_t handle_of(unsigned gpu, unsigned slice) {
    return ((device_t)generation << 32) | ((gpu + 1) << 8) | slice;
}

static int label_of(device_t device, char *label, size_t size) {
    unsigned gpu = (unsigned)(device >> 8) & 0xffff, slice = (unsigned)device & 0xff;
    if (initialized_pid != getpid() || gpu == 0 || device >> 32 != generation) {
        snprintf(label, size, "stale");
        return 0;
    }
    if (slice)
        snprintf(label, size, "%u.mig.%u", gpu - 1, slice - 1);
    else
        snprintf(label, size, "%u", gpu - 1);
    return 1;
}

#define BEGIN(function)                                                     \
    char label[32], key[96];                                                \
    if (!label_of(device, label, sizeof label)) {                           \
        log_call(function, label);                                          \
        return initialized_pid == getpid() ? INVALID_ARGUMENT : UNINITIALIZED; \
    }                                                                       \
    int failed = enter(function, label);                                    \
    if (failed) return failed;                                              \
    (void)key;

#define BEGIN_SYSTEM(function)                                              \
    int failed = enter(function, "system");                                 \
    if (failed) return failed;                                              \
    if (initialized_pid != getpid()) return UNINITIALIZED;

static const char *key_of(char *key, size_t size, const char *label, const char *name) {
    snprintf(key, size, "gpu.%s.%s", label, name);
    return key;
}
#define KEY(name) key_of(key, sizeof key, label, name)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int failed = enter("nvmlInit", "system");
    if (failed) return failed;
    if (initialized_pid != getpid()) {
        initialized_pid = getpid();
        generation++;
    }
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    BEGIN_SYSTEM("nvmlShutdown")
    initialized_pid = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[48];
    snprintf(text, sizeof text, "simulated error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    BEGIN_SYSTEM("nvmlSystemGetDriverVersion")
    return state_get("driver", out, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    BEGIN_SYSTEM("nvmlSystemGetCudaDriverVersion")
    *version = (int)state_number("driver.cuda", 0);
    return *version ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN_SYSTEM("nvmlDeviceGetCount")
    *count = (unsigned)state_number("gpus", 0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    char label[32];
    snprintf(label, sizeof label, "%u", index);
    int failed = enter("nvmlDeviceGetHandleByIndex", label);
    if (failed) return failed;
    if (initialized_pid != getpid()) return UNINITIALIZED;
    if (index >= (unsigned)state_number("gpus", 0)) return INVALID_ARGUMENT;
    *device = handle_of(index, 0);
    return SUCCESS;
}

#define TEXT(function, name)                                                \
    int function(device_t device, char *out, unsigned size) {               \
        BEGIN(#function)                                                    \
        return state_get(KEY(name), out, size) ? SUCCESS : NOT_SUPPORTED;   \
    }

#define NUMBER(function, type, name)                                        \
    int function(device_t device, type *out) {                              \
        BEGIN(#function)                                                    \
        long long value = state_number(KEY(name), -1);                      \
        *out = (type)value;                                                 \
        return value < 0 ? NOT_SUPPORTED : SUCCESS;                         \
    }

TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, int, "pages_pending")

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_info;

int nvmlDeviceGetPciInfo_v3(device_t device, pci_info *out) {
    BEGIN("nvmlDeviceGetPciInfo")
    memset(out, 0, sizeof *out);
    if (!state_get(KEY("pci"), out->bus_id, sizeof out->bus_id)) return NOT_SUPPORTED;
    sscanf(out->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04x:%02x:%02x.0",
             out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;

int nvmlDeviceGetMemoryInfo(device_t device, memory_v1 *out) {
    BEGIN("nvmlDeviceGetMemoryInfo")
    out->total = (unsigned long long)state_number(KEY("total"), 0);
    out->free = (unsigned long long)state_number(KEY("free"), 0);
    /* version 1 counts what the driver reserves as used */
    out->used = (unsigned long long)state_number(KEY("used"), 0) +
                (unsigned long long)state_number(KEY("reserved"), 0);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2 *out) {
    BEGIN("nvmlDeviceGetMemoryInfo_v2")
    if (out->version != 0x02000028) return VERSION_MISMATCH;
    out->total = (unsigned long long)state_number(KEY("total"), 0);
    out->free = (unsigned long long)state_number(KEY("free"), 0);
    out->used = (unsigned long long)state_number(KEY("used"), 0);
    out->reserved = (unsigned long long)state_number(KEY("reserved"), 0);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t device, unsigned *out) {
    BEGIN("nvmlDeviceGetUtilizationRates")
    long long percent = state_number(KEY("util"), -1);
    if (percent < 0) return NOT_SUPPORTED;
    out[0] = (unsigned)percent;
    out[1] = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    BEGIN("nvmlDeviceGetMigMode")
    long long mode = state_number(KEY("mig"), -1);
    if (mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)mode;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    BEGIN("nvmlDeviceGetMaxMigDeviceCount")
    *count = MAX_SLICES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *slice) {
    BEGIN("nvmlDeviceGetMigDeviceHandleByIndex")
    char name[32], uuid[96];
    snprintf(name, sizeof name, "mig.%u.uuid", index);
    if (!state_get(KEY(name), uuid, sizeof uuid)) return NOT_FOUND;
    *slice = device | (index + 1);
    return SUCCESS;
}

/* Health: gpu.I.recovery ACTION, gpu.I.remap_failed 0|1, gpu.I.pages_pending 0|1; no key: the GPU
 * cannot tell. */
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    unsigned long long value;
} field_value;

int nvmlDeviceGetFieldValues(device_t device, int count, field_value *out) {
    BEGIN("nvmlDeviceGetFieldValues")
    long long action = state_number(KEY("recovery"), -1);
    for (int i = 0; i < count; i++) {
        out[i].result = out[i].field == 230 && action >= 0 ? SUCCESS : NOT_SUPPORTED;
        out[i].value = action >= 0 ? (unsigned long long)action : 0;
    }
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(device_t device, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failed_rows) {
    BEGIN("nvmlDeviceGetRemappedRows")
    long long value = state_number(KEY("remap_failed"), -1);
    if (value < 0) return NOT_SUPPORTED;
    *correctable = *uncorrectable = *pending = 0;
    *failed_rows = (unsigned)value;
    return SUCCESS;
}

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_info;

static int list_processes(const char *key, unsigned *count, process_info *out) {
    char text[2048];
    unsigned found = 0, room = out ? *count : 0;
    if (!state_get(key, text, sizeof text)) text[0] = 0;
    char *rest = text;
    for (char *item; (item = strtok_r(rest, " ", &rest)); found++) {
        if (found >= room) continue;
        char *colon = strchr(item, ':');
        memset(&out[found], 0, sizeof out[found]);
        out[found].pid = (unsigned)strtoul(item, NULL, 10);
        out[found].used = !colon || colon[1] == '-' ? ~0ULL : strtoull(colon + 1, NULL, 10);
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(function, name, which)                                      \
    int function(device_t device, unsigned *count, process_info *out) {     \
        BEGIN(name)                                                         \
        return list_processes(KEY(which), count, out);                        \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "nvmlDeviceGetComputeRunningProcesses", "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "nvmlDeviceGetComputeRunningProcesses_v2", "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "nvmlDeviceGetGraphicsRunningProcesses", "graphics")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "nvmlDeviceGetGraphicsRunningProcesses_v2", "graphics")
