/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * vhost-user transcendent memory device: state of one device.
 *
 * The device is complete without a backend: queues, features and configuration
 * space come from its properties alone, and only the generation tells the guest
 * whether a backend is there.
 */
#ifndef HW_VIRTIO_VHOST_USER_TMEM_H
#define HW_VIRTIO_VHOST_USER_TMEM_H

#include "chardev/char-fe.h"
#include "hw/virtio/vhost.h"
#include "hw/virtio/vhost-user.h"
#include "hw/virtio/virtio.h"
#include "qemu/notify.h"
#include "qemu/timer.h"
#include "qom/object.h"
#include "standard-headers/linux/virtio_tmem.h"

#define TYPE_VHOST_USER_TMEM "vhost-user-tmem"
OBJECT_DECLARE_SIMPLE_TYPE(VHostUserTmem, VHOST_USER_TMEM)

/* num-queues=0 means one request queue per vCPU, but at most this many. */
#define VHOST_USER_TMEM_AUTO_QUEUES_MAX 4

/* State of the backend; vhost-user-tmem-backend.c has a diagram. */
typedef enum VHostUserTmemState {
    VHOST_USER_TMEM_IDLE,       /* no backend, or not probed yet */
    VHOST_USER_TMEM_PROBING,    /* GET_FEATURES is sent, not answered */
    VHOST_USER_TMEM_READY,      /* the handshake is under way or done */
    VHOST_USER_TMEM_STARTED,    /* the backend serves the queues */
    VHOST_USER_TMEM_LOST,       /* the connection ended while STARTED */
} VHostUserTmemState;

struct VHostUserTmem {
    VirtIODevice parent_obj;

    /* Properties, fixed from realize on. */
    CharBackend chardev;
    uint16_t num_queues;            /* request queues, no control queue */
    uint16_t queue_size;            /* descriptors in each queue */
    uint32_t backend_timeout_ms;    /* longest wait in one operation */

    /* The configuration space; only the generation ever changes. */
    struct virtio_tmem_config config;

    /*
     * Initialised by a handshake and kept until the next one. So the last
     * backend's limit of memory slots also applies while none is connected.
     */
    struct vhost_dev dev;
    struct vhost_virtqueue *vhost_vqs;
    VirtQueue **virtqs;
    VhostUserState user;

    VHostUserTmemState state;
    bool running;                   /* DRIVER_OK is set and the VM runs */
    bool notify;                    /* an interrupt is to be sent */
    bool changed;                   /* a QMP event is to be sent */
    int faulty_queue;               /* queue outside of memory, or -1 */

    /* Does the work that an event handler must not do itself. */
    QEMUBH *bh;
    QEMUTimer *retry_timer;
    int64_t retry_at_ms;            /* realtime clock; no probe earlier */

    char *last_error;               /* why the backend is refused or lost */
    char *reported_error;           /* refusal written to stderr last */
    char *last_event;               /* content of the QMP event sent last */

    bool source_retain;             /* property retain at the source */

    NotifierWithReturn memory_notifier;
    NotifierWithReturn migration_notifier;
};

/**
 * vhost_user_tmem_num_queues() - number of request queues of the device
 * @s: device, not necessarily realized
 *
 * Returns: the property num-queues, or its default on this machine if it is 0.
 */
uint16_t vhost_user_tmem_num_queues(VHostUserTmem *s);

/* Functions of vhost-user-tmem.c for the other files of the device */

/* Returns the device's id, or the chardev's id if the device has none. */
const char *vhost_user_tmem_name(VHostUserTmem *s);

/* Returns the number of request queues and the control queue. */
unsigned int vhost_user_tmem_num_virtqs(VHostUserTmem *s);

/* Sends the QMP event of the current state, unless the last event is equal. */
void vhost_user_tmem_send_event(VHostUserTmem *s);

/* Functions of vhost-user-tmem-backend.c */

/**
 * vhost_user_tmem_backend_init() - prepare the connection to a backend
 * @s: device whose properties were checked
 * @errp: the reason if the chardev cannot be used
 *
 * Returns: false on error. Nothing is connected before
 * vhost_user_tmem_backend_open().
 */
bool vhost_user_tmem_backend_init(VHostUserTmem *s, Error **errp);

/* Connects now if the chardev is open, otherwise as soon as it is. */
void vhost_user_tmem_backend_open(VHostUserTmem *s);

/* Ends the connection of a stopped device and frees its resources. */
void vhost_user_tmem_backend_cleanup(VHostUserTmem *s);

/* Starts or stops the backend according to @s->running. */
void vhost_user_tmem_update(VHostUserTmem *s);

/* Returns whether a backend passed the handshake. */
bool vhost_user_tmem_connected(VHostUserTmem *s);

/* Returns the generation that the guest reads. */
uint64_t vhost_user_tmem_generation(VHostUserTmem *s);

/* Changes the generation that the guest reads, without an interrupt. */
void vhost_user_tmem_set_generation(VHostUserTmem *s, uint64_t generation);

/* Schedules a configuration interrupt, which the bottom half raises. */
void vhost_user_tmem_notify(VHostUserTmem *s);

/* Functions of vhost-user-tmem-memory.c */

/* Checks that a backend can map all memory that the machine has. */
bool vhost_user_tmem_memory_check(VHostUserTmem *s, Error **errp);

/*
 * Start (init) and stop (cleanup) the refusal of private memory and of
 * background snapshots.
 */
void vhost_user_tmem_memory_init(VHostUserTmem *s);
void vhost_user_tmem_memory_cleanup(VHostUserTmem *s);

/* Returns whether an incoming migration has not yet brought all memory. */
bool vhost_user_tmem_memory_is_incoming(void);

/* Returns the number of a queue whose ring is outside of memory, or -1. */
int vhost_user_tmem_find_faulty_queue(VHostUserTmem *s);

#endif
