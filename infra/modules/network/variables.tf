variable "name" {
  type        = string
  description = "First word of all names."
}

variable "account_id" {
  type        = string
  description = "Account that the network belongs to."
}

variable "region" {
  type        = string
  description = "Region of the endpoints."
}

variable "availability_zone" {
  type        = string
  description = "The one zone of the subnet: collectives of Trainium do not work across zones."
}

variable "cidr" {
  type        = string
  description = "Address range of the VPC; its first half is the subnet."
}

variable "key_arn" {
  type        = string
  description = "KMS key of the flow logs."
}

variable "log_retention_days" {
  type        = number
  description = "Days that flow logs are kept."
}

variable "more_services" {
  type        = set(string)
  description = "Services with an endpoint beside the usual ones."
  default     = []
}
