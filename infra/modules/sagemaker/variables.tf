variable "name" {
  type        = string
  description = "First word of all names; names of training jobs begin with it."
}

variable "account_id" {
  type        = string
  description = "Id of the AWS account."
}

variable "region" {
  type        = string
  description = "AWS region."
}

variable "driver_role" {
  type        = string
  description = "Name of the role that makes, follows and ends training jobs."
}

variable "report_role" {
  type        = string
  description = "Name of the role of the report, which describes training jobs."
}

variable "training_roles" {
  type        = list(string)
  description = "Names of the roles that training jobs have."
}

variable "workspace_arn" {
  type        = string
  description = "ARN of the workspace."
}

variable "repository_arn" {
  type        = string
  description = "ARN of the repository of the images."
}

variable "subnet_id" {
  type        = string
  description = "Subnet of the training jobs."
}

variable "security_group_id" {
  type        = string
  description = "Security group of the training jobs."
}

variable "log_retention_days" {
  type        = number
  description = "Days that logs of all training jobs of the account and region are kept."
}

variable "topic_arn" {
  type        = string
  description = "Topic of all alarms."
}

variable "instances" {
  type        = number
  description = "Instances that service jobs may use at once; 0: no queue of service jobs."
}

variable "scheduling_policy_arn" {
  type        = string
  description = "Fair-share policy of the queue of service jobs."
}

variable "share_identifier" {
  type        = string
  description = "The one share that the driver may submit service jobs in."
}

variable "wait_limit_s" {
  type        = number
  description = "Seconds that a service job may block the head of its queue before it is ended."
}
