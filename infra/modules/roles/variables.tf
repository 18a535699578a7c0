variable "name" {
  description = "First word of all names; jobs.name of the pipeline's settings, and the value of the tag `pipeline` of its jobs."
  type        = string
}

variable "account_id" {
  description = "Id of the AWS account."
  type        = string

  validation {
    condition     = can(regex("^[0-9]{12}$", var.account_id))
    error_message = "account_id is \"${var.account_id}\"; expected 12 digits: aws sts get-caller-identity."
  }
}

variable "region" {
  description = "AWS region of everything the roles may use."
  type        = string
}

variable "bucket_arn" {
  description = "ARN of the bucket that holds the workspace."
  type        = string
}

variable "workspace_arn" {
  description = "ARN of the workspace: that of the bucket, a slash, workspace_prefix."
  type        = string
}

variable "workspace_prefix" {
  description = "Key prefix of the workspace in its bucket, without slashes at its ends."
  type        = string
}

variable "data" {
  description = "Inputs to read: bucket (a name), prefix (a file or a folder; empty: the whole bucket) and, where it has one, the ARN of the key that encrypts them."
  type        = list(object({ bucket = string, prefix = string, kms_key_arn = optional(string) }))
  default     = []

  validation {
    condition     = length(var.data) <= 4 && alltrue([for one in var.data : length(one.prefix) <= 150])
    error_message = "data has ${length(var.data)} entries; expected at most 4, with prefixes of at most 150 characters: the policies of a role hold 10,240 in all. Name a common prefix."
  }
  validation {
    condition     = alltrue([for one in var.data : one.prefix == trim(one.prefix, "/") && can(regex("^[^*?$]*$", one.prefix))])
    error_message = "A prefix of data begins or ends with a slash, or holds *, ? or $; expected one such as esci/2026."
  }
}

variable "key_arn" {
  description = "ARN of the KMS key of the workspace and of the dead-letter queue."
  type        = string
}

variable "signing_key_arn" {
  description = "ARN of the KMS key that signs promoted models; null if none does."
  type        = string
  default     = null
}

variable "log_group_arn" {
  description = "ARN of the log group of all jobs."
  type        = string
}

variable "queue_arns" {
  description = "ARNs of the job queues that the driver submits stages to."
  type        = list(string)
}

variable "schedule_queue_arn" {
  description = "ARN of the one job queue that the schedules may submit to."
  type        = string
}

variable "definition_prefix" {
  description = "What the names of this pipeline's job definitions begin with, before a hyphen and the stage."
  type        = string
}

variable "share_identifier" {
  description = "The one fair share that the driver and the schedules may submit under."
  type        = string
}

variable "sagemaker" {
  description = "Whether training jobs of SageMaker may take on the roles of the stages, too."
  type        = bool
  default     = false
}
