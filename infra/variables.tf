# Who and where. The fleet is in variables_fleet.tf, when cycles run in variables_schedule.tf.

variable "name" {
  type        = string
  description = "First word of all names: queues, roles, job definitions, jobs."

  validation {
    condition     = can(regex("^[a-z][a-z0-9]*(-[a-z0-9]+)*$", var.name)) && length(var.name) >= 2 && length(var.name) <= 31
    error_message = "name is \"${var.name}\"; expected 2 to 31 lower-case letters, digits and single -, beginning with a letter and not ending in -."
  }
}

variable "region" {
  type        = string
  description = "AWS region, such as us-west-2."

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region is \"${var.region}\"; expected a name such as us-west-2."
  }
}

variable "availability_zone" {
  type        = string
  description = "The one zone of all nodes, by name; it must offer the Trainium instance in this account."

  validation {
    condition     = startswith(var.availability_zone, var.region) && can(regex("[a-z]$", var.availability_zone))
    error_message = "availability_zone is \"${var.availability_zone}\"; expected a zone of ${var.region}, such as ${var.region}a."
  }
}

variable "vpc_cidr" {
  type        = string
  description = "Address range of the VPC, of which nodes get half. A trn1.32xlarge takes an address for each of its interfaces."
  default     = "10.20.0.0/16"

  validation {
    condition     = can(cidrnetmask(var.vpc_cidr)) && can(regex("/(1[6-9]|2[0-4])$", var.vpc_cidr))
    error_message = "vpc_cidr is \"${var.vpc_cidr}\"; expected an IPv4 range from /16 to /24, such as 10.20.0.0/16."
  }

  validation {
    # Each interface takes an address, and so does the container of a multi-node job; the rest is for endpoints and CPU machines.
    condition = try(
      var.max_nodes * (local.trainium[var.instance_type].efa_interfaces + 2) + 64 <= pow(2, 31 - tonumber(split("/", var.vpc_cidr)[1])), true
    )
    error_message = "vpc_cidr is \"${var.vpc_cidr}\", half of which is too small for ${var.max_nodes} nodes with an address for each of their interfaces; expected a range such as 10.20.0.0/16."
  }
}

variable "emulator" {
  type        = bool
  description = "The account is moto, at AWS_ENDPOINT_URL: for tests. Leaves out what moto cannot do."
  default     = false
}

variable "force_destroy" {
  type        = bool
  description = "Let terraform destroy delete the bucket with all models and the repository with all images. Apply it first, then destroy."
  default     = false
}

variable "image" {
  type        = string
  description = "Container image of Neuron jobs, by digest, in a registry that the private subnet reaches (this account's ECR)."

  validation {
    condition     = can(regex("^[^@[:space:]]+@sha256:[0-9a-f]{64}$", var.image)) && length(var.image) <= 255
    error_message = "image is \"${var.image}\"; expected repository@sha256:<64 hex digits>, at most 255 characters: a tag may move. make push prints it."
  }
}

variable "cpu_image" {
  type        = string
  description = "Container image of the driver and of CPU jobs, by digest. Not the Neuron image: that one looks for a device."

  validation {
    condition     = can(regex("^[^@[:space:]]+@sha256:[0-9a-f]{64}$", var.cpu_image)) && length(var.cpu_image) <= 255
    error_message = "cpu_image is \"${var.cpu_image}\"; expected repository@sha256:<64 hex digits>, at most 255 characters: a tag may move. make push prints it."
  }
}

variable "settings_files" {
  type        = list(string)
  description = "Settings of the cycle: paths inside the image, later ones win. What Terraform knows (names, roles, schedule) comes on top."
  default     = ["configs/base.toml", "configs/jobs/trn1.toml"]

  validation {
    condition     = alltrue([for path in var.settings_files : can(regex("^configs/[A-Za-z0-9_./-]+\\.toml$", path))])
    error_message = "settings_files is ${jsonencode(var.settings_files)}; expected configs/<name>.toml: nothing else is in the image."
  }
}

variable "embed_on_trainium" {
  type        = bool
  description = "The catalogue is embedded on the Trainium queue, with its image; settings_files then end with configs/jobs/embed-trn1.toml. Else on CPU machines. trnjobs plan prices both."
  default     = false

  validation {
    condition     = var.embed_on_trainium == contains(var.settings_files, "configs/jobs/embed-trn1.toml")
    error_message = "embed_on_trainium is ${var.embed_on_trainium}, settings_files are ${jsonencode(var.settings_files)}; expected configs/jobs/embed-trn1.toml among them when true, and not when false."
  }
}

variable "job_environment" {
  type        = map(string)
  description = "Variables of every job, such as NEURON_RT_EXEC_TIMEOUT; they take the place of [jobs.environment] in settings. No secrets."
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.job_environment) : can(regex("^[A-Za-z_][A-Za-z0-9_]*$", name)) && !startswith(name, "AWS_BATCH")])
    error_message = "job_environment names ${join(", ", keys(var.job_environment))}; expected names of variables that do not begin with AWS_BATCH."
  }
}

variable "data" {
  type = list(object({
    bucket      = string
    prefix      = string
    kms_key_arn = optional(string)
  }))
  description = "Where cycles may read their input, besides the workspace, in this region (the endpoint of S3 leads to no other): bucket, file or folder in it (empty: all of it), and the key it is encrypted with. At most four."
  default     = []

  validation {
    condition     = alltrue([for one in var.data : can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", one.bucket))])
    error_message = "data names the buckets ${jsonencode(var.data[*].bucket)}; expected names without s3:// and without a path."
  }

  validation {
    condition     = alltrue([for one in var.data : one.prefix == trim(one.prefix, "/") && can(regex("^[^*?$]*$", one.prefix))])
    error_message = "data has the prefixes ${jsonencode(var.data[*].prefix)}; expected no / at either end, and no *, ? or $."
  }

  validation {
    condition     = length(var.data) <= 4 && alltrue([for one in var.data : length(one.prefix) <= 150])
    error_message = "data has ${length(var.data)} entries; expected at most 4, with prefixes of at most 150 characters: the policies of a role hold no more. Name a common prefix."
  }
}

variable "notify_emails" {
  type        = list(string)
  description = "Who is told of failures. Each address gets a message to confirm first."

  validation {
    condition     = length(var.notify_emails) > 0 && alltrue([for one in var.notify_emails : can(regex("^[^@[:space:]]+@[^@[:space:]]+$", one))])
    error_message = "notify_emails is ${jsonencode(var.notify_emails)}; expected at least one address: an alarm that nobody hears is none."
  }
}

variable "budget_usd" {
  type        = number
  description = "USD a month; told at 80 % and when the forecast passes it. 0: no budget."

  validation {
    condition     = var.budget_usd >= 0
    error_message = "budget_usd is ${var.budget_usd}; expected 0 or more."
  }
}

variable "log_retention_days" {
  type        = number
  description = "Days that logs are kept."
  default     = 90

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_retention_days)
    error_message = "log_retention_days is ${var.log_retention_days}; expected one that CloudWatch has: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731 or a whole number of years in its list."
  }
}
