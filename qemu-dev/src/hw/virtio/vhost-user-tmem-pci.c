/*
 * vhost-user transcendent memory device: PCI glue
 *
 * Modern virtio only: there is no legacy driver, and a legacy device id could
 * not be assigned.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "hw/qdev-properties.h"
#include "hw/virtio/vhost-user-tmem.h"
#include "hw/virtio/virtio-pci.h"

/*
 * Interrupt vectors beside those of the request queues: configuration changes,
 * the control queue, and one kept free for an event queue, so that adding it
 * later does not change the layout of the PCI device.
 */
#define VHOST_USER_TMEM_EXTRA_VECTORS 3

struct VHostUserTmemPCI {
    VirtIOPCIProxy parent_obj;
    VHostUserTmem vdev;
};

typedef struct VHostUserTmemPCI VHostUserTmemPCI;

#define TYPE_VHOST_USER_TMEM_PCI "vhost-user-tmem-pci-base"

DECLARE_INSTANCE_CHECKER(VHostUserTmemPCI, VHOST_USER_TMEM_PCI,
                         TYPE_VHOST_USER_TMEM_PCI)

static const Property vhost_user_tmem_pci_properties[] = {
    DEFINE_PROP_UINT32("vectors", VirtIOPCIProxy, nvectors,
                       DEV_NVECTORS_UNSPECIFIED),
};

static void vhost_user_tmem_pci_realize(VirtIOPCIProxy *vpci_dev, Error **errp)
{
    VHostUserTmemPCI *dev = VHOST_USER_TMEM_PCI(vpci_dev);
    DeviceState *vdev = DEVICE(&dev->vdev);

    if (vpci_dev->nvectors == DEV_NVECTORS_UNSPECIFIED) {
        vpci_dev->nvectors = vhost_user_tmem_num_queues(&dev->vdev) +
                             VHOST_USER_TMEM_EXTRA_VECTORS;
    }

    qdev_realize(vdev, BUS(&vpci_dev->bus), errp);
}

static void vhost_user_tmem_pci_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);
    VirtioPCIClass *k = VIRTIO_PCI_CLASS(klass);
    PCIDeviceClass *pcidev_k = PCI_DEVICE_CLASS(klass);

    k->realize = vhost_user_tmem_pci_realize;
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
    device_class_set_props(dc, vhost_user_tmem_pci_properties);
    pcidev_k->vendor_id = PCI_VENDOR_ID_REDHAT_QUMRANET;
    pcidev_k->device_id = 0; /* Set by virtio-pci based on virtio id */
    pcidev_k->revision = 0x00;
    pcidev_k->class_id = PCI_CLASS_OTHERS;
}

static void vhost_user_tmem_pci_instance_init(Object *obj)
{
    VHostUserTmemPCI *dev = VHOST_USER_TMEM_PCI(obj);

    virtio_instance_init_common(obj, &dev->vdev, sizeof(dev->vdev),
                                TYPE_VHOST_USER_TMEM);
}

static const VirtioPCIDeviceTypeInfo vhost_user_tmem_pci_info = {
    .base_name = TYPE_VHOST_USER_TMEM_PCI,
    .non_transitional_name = "vhost-user-tmem-pci",
    .instance_size = sizeof(VHostUserTmemPCI),
    .instance_init = vhost_user_tmem_pci_instance_init,
    .class_init = vhost_user_tmem_pci_class_init,
};

static void vhost_user_tmem_pci_register(void)
{
    virtio_pci_types_register(&vhost_user_tmem_pci_info);
}

type_init(vhost_user_tmem_pci_register);
