locals {
  # Services that use the key on their own behalf: alarms and the budget publish to the encrypted topic, the scheduler
  # writes to the encrypted dead-letter queue.
  publishers = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com", "scheduler.amazonaws.com", "sns.amazonaws.com"]
}

resource "aws_kms_key" "this" {
  description             = "${var.name}: workspace, images, logs, alarms"
  enable_key_rotation     = true
  deletion_window_in_days = 30
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.id
}

# In a key's own policy the resource * is this key.
resource "aws_kms_key_policy" "this" {
  key_id = aws_kms_key.this.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "AccountDecidesByIam"
        Effect    = "Allow"
        Principal = { AWS = "arn:aws:iam::${var.account_id}:root" }
        Action    = "kms:*"
        Resource  = "*"
      },
      {
        Sid       = "Logs"
        Effect    = "Allow"
        Principal = { Service = "logs.${var.region}.amazonaws.com" }
        Action    = ["kms:Encrypt*", "kms:Decrypt*", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:Describe*"]
        Resource  = "*"
        Condition = {
          ArnLike = { "kms:EncryptionContext:aws:logs:arn" = "arn:aws:logs:${var.region}:${var.account_id}:log-group:/${var.name}/*" }
        }
      },
      {
        Sid       = "Publishers"
        Effect    = "Allow"
        Principal = { Service = local.publishers }
        Action    = ["kms:Decrypt", "kms:GenerateDataKey*"]
        Resource  = "*"
        Condition = { StringEquals = { "aws:SourceAccount" = var.account_id } }
      },
      {
        # Without a condition: EventBridge takes none in the policy of a topic, and passes none on to its key.
        Sid       = "Events"
        Effect    = "Allow"
        Principal = { Service = "events.amazonaws.com" }
        Action    = ["kms:Decrypt", "kms:GenerateDataKey*"]
        Resource  = "*"
      },
    ]
  })
}
