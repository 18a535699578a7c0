# Machines, queues and who gets how much of them.

locals {
  # vCPU and EFA interfaces by type; pipeline/core/machines.py has the same (a test compares them).
  trainium = jsondecode(file("${path.module}/trainium.json"))
}

variable "instance_type" {
  type        = string
  description = "Trainium instances of a multi-node job."
  default     = "trn1.32xlarge"

  validation {
    condition     = contains(keys(local.trainium), var.instance_type)
    error_message = "instance_type is \"${var.instance_type}\"; expected one of ${join(", ", keys(local.trainium))}."
  }
}

variable "max_nodes" {
  type        = number
  description = "Trainium instances at once, of all cycles and experiments together."
  default     = 4

  validation {
    condition     = var.max_nodes >= 1 && var.max_nodes == floor(var.max_nodes)
    error_message = "max_nodes is ${var.max_nodes}; expected a whole number from 1."
  }

  validation {
    condition     = var.max_nodes * try(local.trainium[var.instance_type].vcpus, 0) <= var.quota_vcpus
    error_message = "max_nodes is ${var.max_nodes}, which needs ${var.max_nodes * try(local.trainium[var.instance_type].vcpus, 0)} vCPU of ${var.instance_type}, and quota_vcpus is ${var.quota_vcpus}: jobs would wait for ever. Expected fewer nodes, or a raised quota."
  }
}

variable "quota_vcpus" {
  type        = number
  description = "The account's quota \"Running On-Demand Trn instances\", in vCPU; make bootstrap prints how to ask for it. With a capacity block: its vCPU."
}

variable "ami_id" {
  type        = string
  description = "Machine image of Trainium instances: ECS agent and a Neuron driver that fits the container's runtime (docs/neuron.md). make bootstrap lists candidates."
  default     = ""

  validation {
    condition     = can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id is \"${var.ami_id}\"; expected ami-<hex digits>, chosen and not the newest: a newer image has a Neuron driver that the container's runtime cannot work with, and nrt_init fails on every machine. Next: make bootstrap, step 6, lists those of the right age."
  }
}

variable "capacity_block_id" {
  type        = string
  description = "Capacity block (cr-...) that Trainium instances come from; empty: on demand."
  default     = ""

  validation {
    condition     = var.capacity_block_id == "" || can(regex("^cr-[0-9a-f]{8,17}$", var.capacity_block_id))
    error_message = "capacity_block_id is \"${var.capacity_block_id}\"; expected cr-<hex digits>, or empty."
  }
}

variable "root_volume_gib" {
  type        = number
  description = "Root volume of a Trainium instance in GiB, which also holds images and scratch; that of CPU machines is cpu.root_volume_gib."
  default     = 512

  validation {
    condition     = var.root_volume_gib >= 100 && var.root_volume_gib <= 16384
    error_message = "root_volume_gib is ${var.root_volume_gib}; expected 100 to 16384: the Neuron image alone takes tens of GiB."
  }
}

variable "stop_timeout_s" {
  type        = number
  description = "Seconds from SIGTERM to SIGKILL; a process of ours saves and ends within 20."
  default     = 30

  validation {
    condition     = var.stop_timeout_s >= 30 && var.stop_timeout_s <= 3600
    error_message = "stop_timeout_s is ${var.stop_timeout_s}; expected 30 to 3600."
  }
}

variable "cpu" {
  type = object({
    instance_types  = optional(list(string), ["m6i", "m7i", "r6i"])
    max_vcpus       = optional(number, 256)
    spot            = optional(bool, true)
    root_volume_gib = optional(number, 100)
  })
  description = "CPU machines of the driver and of work without Trainium: types or families, most vCPU at once, Spot or on demand, GiB of the root volume."
  default     = {}

  validation {
    condition     = length(var.cpu.instance_types) > 0 && var.cpu.max_vcpus >= 16
    error_message = "cpu is ${jsonencode(var.cpu)}; expected at least one instance type and max_vcpus from 16 (the job that prepares data)."
  }

  validation {
    condition     = var.cpu.root_volume_gib >= 60 && var.cpu.root_volume_gib <= 16384
    error_message = "cpu.root_volume_gib is ${var.cpu.root_volume_gib}; expected 60 to 16384: images, and the scratch of every job on the machine."
  }
}

variable "shares" {
  type        = map(number)
  description = "Weight by share identifier. The LOWER the weight, the more: 1 gets twice as much as 2."
  default     = { production = 1, experiments = 2, backfills = 4 }

  validation {
    condition     = length(var.shares) > 0 && alltrue([for share in keys(var.shares) : can(regex("^[A-Za-z0-9]{1,254}\\*?$", share))])
    error_message = "shares names ${join(", ", keys(var.shares))}; expected letters and digits only (no - or _), * only at the end."
  }

  validation {
    condition     = alltrue([for weight in values(var.shares) : weight >= 0.0001 && weight <= 999.9999])
    error_message = "shares has the weights ${join(", ", values(var.shares))}; expected 0.0001 to 999.9999."
  }

  validation {
    condition = alltrue(flatten([for group in keys(var.shares) : [for share in keys(var.shares) :
      share == group || !startswith(share, trimsuffix(group, "*"))
    ] if endswith(group, "*")]))
    error_message = "shares names ${join(", ", keys(var.shares))}; expected no identifier that another one with * covers as well."
  }
}

variable "share_identifier" {
  type        = string
  description = "Whose share the cycles are; one of shares."
  default     = "production"

  validation {
    condition     = can(regex("^[A-Za-z0-9]{1,255}$", var.share_identifier)) && contains(keys(var.shares), var.share_identifier)
    error_message = "share_identifier is \"${var.share_identifier}\"; expected one of shares (${join(", ", keys(var.shares))}), letters and digits."
  }
}

variable "share_decay_s" {
  type        = number
  description = "Seconds that the past use of a share counts; AWS takes 600 for 0."
  default     = 3600

  validation {
    condition     = var.share_decay_s >= 0 && var.share_decay_s <= 604800
    error_message = "share_decay_s is ${var.share_decay_s}; expected 0 to 604800 (a week)."
  }
}

variable "compute_reservation" {
  type        = number
  description = "Percent of the vCPU held back for shares that are not active yet."
  default     = 0

  validation {
    condition     = var.compute_reservation >= 0 && var.compute_reservation <= 99
    error_message = "compute_reservation is ${var.compute_reservation}; expected 0 to 99."
  }
}

variable "queue_wait_limit_s" {
  type        = number
  description = "Seconds that a job without capacity, or too large for its queue, may block the head of the queue before it is cancelled."
  default     = 21600

  validation {
    condition     = var.queue_wait_limit_s >= 600 && var.queue_wait_limit_s <= 86400
    error_message = "queue_wait_limit_s is ${var.queue_wait_limit_s}; expected 600 to 86400."
  }
}

variable "signing_key_arn" {
  type        = string
  description = "Asymmetric KMS key (SIGN_VERIFY) that evaluate signs promoted models with, and that embed verifies them with: rights, endpoint. registry.sign_key and registry.verify_key name it too. docs/runbook.md."
  default     = null

  validation {
    condition     = var.signing_key_arn == null || can(regex("^arn:aws:kms:[^:]+:[0-9]{12}:key/[^*?$]+$", var.signing_key_arn))
    error_message = "signing_key_arn is \"${coalesce(var.signing_key_arn, "null")}\"; expected the ARN of one key, arn:aws:kms:<region>:<account>:key/<id>."
  }
}

variable "sagemaker" {
  type        = bool
  description = "Jobs may also run as training jobs of Amazon SageMaker (trnjobs submit --target sagemaker): rights, endpoint, log group, alarms. docs/sagemaker.md."
  default     = false
}

variable "sagemaker_instances" {
  type        = number
  description = "Instances that training jobs share through a fair-share queue of service jobs, at most the account's quota of their type; 0: no such queue, SageMaker is called directly."
  default     = 0

  validation {
    condition     = var.sagemaker_instances >= 0 && var.sagemaker_instances == floor(var.sagemaker_instances)
    error_message = "sagemaker_instances is ${var.sagemaker_instances}; expected a whole number from 0."
  }

  validation {
    condition     = var.sagemaker_instances == 0 || var.sagemaker
    error_message = "sagemaker_instances is ${var.sagemaker_instances} and sagemaker is false; expected sagemaker = true for a queue of training jobs."
  }
}
